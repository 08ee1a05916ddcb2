"""Who is alive, whose share is what, and who agrees to which step."""

from __future__ import annotations

import pytest

from swarmtune.clients import ClientError, ClientRegistry
from swarmtune.config import BatchingConfig
from swarmtune.protocol import Code


def registry(clock, **batching) -> ClientRegistry:
    return ClientRegistry(BatchingConfig(client_timeout_s=10.0, **batching), 8, clock)


def test_a_client_is_alive_until_its_last_sign_is_older_than_the_timeout(clock):
    clients = registry(clock)
    clients.register("a")
    for sign in (
        lambda: clients.heartbeat("a"),
        lambda: clients.seen("a"),
        lambda: clients.agree("a", 1, expected=1),
        lambda: clients.register("a"),
    ):
        clock.advance(10)
        assert clients.is_alive("a")
        sign()
        assert clients.view("a").heartbeat_age_s == 0.0
    clock.advance(10.1)
    assert not clients.is_alive("a") and clients.live() == []
    assert clients.heartbeat("a").alive


def test_an_unknown_client_is_told_to_register(clock):
    clients = registry(clock)
    clients.register("a")
    for use in (clients.heartbeat, clients.view, clients.require, lambda n: clients.agree(n, 1, expected=1)):
        with pytest.raises(ClientError, match=r"known: a\); register") as refusal:
            use("b")
        assert refusal.value.code is Code.UNKNOWN_CLIENT
    clients.require(None)
    clients.require("a")
    clients.seen("b")
    assert not clients.is_alive("b")


def test_shares_of_live_clients_must_fit_the_batch(clock):
    clients = registry(clock)
    clients.register("a", 5)
    with pytest.raises(ClientError, match="at most 3") as refusal:
        clients.register("b", 4)
    assert refusal.value.code is Code.BAD_REQUEST
    clients.register("b", 3)
    clients.register("a", 5)  # a restart of the same client does not count twice
    clients.register("a", 2)
    assert clients.live_shares() == {"a": 2, "b": 3}


def test_a_client_that_comes_back_gets_what_is_left_of_the_batch(clock):
    clients = registry(clock)
    clients.register("a", 5)
    clients.register("b", 3)
    clock.advance(11)
    clients.heartbeat("a")
    assert (clients.live_shares(), clients.lapsed_shares()) == ({"a": 5}, {"b": 3})
    clients.register("c", 2)
    clients.heartbeat("b")
    assert clients.live_shares() == {"a": 5, "b": 3, "c": 0}
    clients.remove("a")
    clients.remove("a")
    assert clients.live_shares() == {"b": 3, "c": 2}


def test_an_agreement_is_for_one_step_and_lapses_with_it(clock):
    clients = registry(clock)
    clients.register("a")
    clients.register("b")
    with pytest.raises(ClientError, match="agree to 3") as refusal:
        clients.agree("a", 2, expected=3)
    assert refusal.value.code is Code.STEP_MISMATCH
    clients.agree("a", 3, expected=3)
    clock.advance(4)
    clients.agree("a", 3, expected=3)
    agreement = clients.agreement(3)
    assert (agreement.agreed, agreement.needed, agreement.missing) == (1, 2, ("b",))
    assert agreement.first_age_s == 4.0
    assert (clients.agreement(4).agreed, clients.agreement(4).first_age_s) == (0, None)


def test_the_dead_neither_agree_nor_are_asked(clock):
    clients = registry(clock)
    for name in "abc":
        clients.register(name)
    clients.agree("a", 1, expected=1)
    clock.advance(8)
    clients.heartbeat("b")
    clock.advance(8)
    agreement = clients.agreement(1)
    assert (agreement.live, agreement.agreed, agreement.signals, agreement.needed) == (1, 0, 1, 1)
    assert agreement.missing == ("b",)


@pytest.mark.parametrize(("quorum", "needed"), [(1.0, 5), (0.6, 3), (0.5, 3), (0.01, 1)])
def test_the_quorum_is_rounded_up_and_at_least_one(clock, quorum, needed):
    clients = registry(clock, quorum=quorum)
    assert clients.agreement(1).needed == 1
    for name in "abcde":
        clients.register(name)
    assert clients.agreement(1).needed == needed


def test_rounding_does_not_ask_for_one_client_too_many(clock):
    clients = registry(clock, quorum=0.28)
    for n in range(25):
        clients.register(f"c{n}")
    assert clients.agreement(1).needed == 7  # 0.28 · 25 is 7.000000000000001 in floats


def test_clients_known_before_a_restart_have_a_timeout_to_show_up(clock):
    clients = registry(clock)
    clients.restore({"a": 6, "b": 6, "c": None})
    assert (clients.live_shares(), clients.live()) == ({"a": 6, "b": 2}, ["a", "b", "c"])
    clock.advance(11)
    assert clients.live() == [] and clients.heartbeat("b").alive
