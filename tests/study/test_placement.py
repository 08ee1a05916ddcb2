"""Placement: gangs whole, nobody starves, little idles; a pure function under simulation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3r.placement import Request, Tenant, pick_slots, place

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import scheduler


def host(name: str, slots: int) -> dict[str, list[str]]:
    return {name: [f"gpu/{n}" for n in range(slots)]}


@pytest.mark.parametrize("exact", [True, False])
def test_a_thousand_mixed_runs_reach_95_percent_of_the_packing_bound(exact):
    out = scheduler.simulate(scheduler.workload(1, exact=exact))
    assert out.efficiency >= 0.95
    assert out.double_booked == 0


def test_a_stream_of_small_runs_does_not_starve_a_gang():
    """Small runs keep arriving on full hosts; the 8-GPU run starts within its reservation, not at the end."""
    jobs = [
        scheduler.Job(Request(f"small{n:04d}", 1, 3600.0), arrives_s=n * 50.0, takes_s=3600.0 * (0.5 + n % 5 / 10))
        for n in range(900)
    ]
    gang = scheduler.Job(Request("gang", 8, 3600.0), arrives_s=5000.0, takes_s=3600.0)
    out = scheduler.simulate([*jobs, gang])
    assert out.longest_gang_wait_s <= 2 * 3600.0


def test_low_priority_ages_past_a_stream_of_high_priority():
    jobs = [scheduler.Job(Request(f"high{n:04d}", 8, 3600.0, priority=0), n * 400.0, 3600.0) for n in range(200)]
    low = scheduler.Job(Request("low", 8, 3600.0, priority=3), 0.0, 3600.0)
    waits = scheduler.simulate([*jobs, low]).longest_wait_s
    assert waits < 6 * 3600.0


def test_a_gang_stays_on_one_host():
    free = host("a", 3) | host("b", 5)
    assert place([Request("r", 4, 10.0)], free, []) == [place([Request("r", 4, 10.0)], free, [])[0]]
    assert place([Request("r", 4, 10.0)], free, [])[0].host == "b"
    assert place([Request("r", 6, 10.0)], free, []) == []


def test_the_fullest_host_that_fits_is_taken():
    assert place([Request("r", 1, 10.0)], host("a", 8) | host("b", 2), [])[0].host == "b"


def test_backfill_passes_a_waiting_gang_only_when_it_cannot_delay_it():
    free = {"a": ["gpu/0", "gpu/1"]}
    tenants = [Tenant("a", 6, ends_in_s=100.0)]
    gang = Request("gang", 8, 1000.0)
    assert [p.run for p in place([gang, Request("short", 1, 90.0, priority=1)], free, tenants)] == ["short"]
    assert place([gang, Request("long", 1, 200.0, priority=1)], free, tenants) == []


def test_a_failing_host_is_avoided_while_another_fits_and_used_when_none_does():
    free = host("a", 2) | host("b", 8)
    assert place([Request("r", 1, 10.0, avoid=frozenset({"a"}))], free, [])[0].host == "b"
    assert place([Request("r", 1, 10.0, avoid=frozenset({"a"}))], host("a", 2), [])[0].host == "a"


def test_gangs_get_neighbouring_aligned_slots():
    assert pick_slots(["gpu/1", "gpu/2", "gpu/3", "gpu/4", "gpu/5"], 2) == ("gpu/2", "gpu/3")
    assert pick_slots(["gpu/1", "gpu/3"], 2) == ("gpu/1", "gpu/3")


sizes = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(1, 1e4), st.integers(0, 3)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(sizes, st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_no_slot_is_given_twice_and_the_same_question_has_the_same_answer(wanted, hosts):
    requests = [Request(f"r{n}", size, max_s, priority) for n, (size, max_s, priority) in enumerate(wanted)]
    free = {f"h{n}": [f"gpu/{g}" for g in range(count)] for n, count in enumerate(hosts)}
    placements = place(requests, free, [])
    taken = [(p.host, slot) for p in placements for slot in p.slots]
    assert len(taken) == len(set(taken))
    assert all(slot in free[h] for h, slot in taken)
    assert placements == place(list(reversed(requests)), free, [])
