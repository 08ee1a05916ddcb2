"""Nights: none twice, none skipped; one service at a time; a summary for each."""

import datetime as dt
import json

import pytest

from a3r.bench.nightly import BadTime, Night, Nights, parse_time
from a3r.bench.session import Exit
from a3r.bench.store import Busy, Results

ZONE = dt.timezone(dt.timedelta(hours=1))


class Clock:
    def __init__(self, text):
        self.set(text)

    def set(self, text):
        self.now = dt.datetime.fromisoformat(text).replace(tzinfo=ZONE)

    def __call__(self):
        return self.now


class Work:
    """Counts nights; dies in the middle when told so."""

    def __init__(self):
        self.nights = 0
        self.dies = False

    def __call__(self):
        if self.dies:
            raise KeyboardInterrupt
        self.nights += 1
        return Night(Exit.FINE, ("c" * 40,), "summary\n")


@pytest.fixture
def work():
    return Work()


@pytest.fixture
def clock():
    return Clock("2026-03-01T12:00:00")


@pytest.fixture
def nights(tmp_path, work, clock):
    made = Nights(Results(tmp_path), (2, 0), work, clock)
    made.start()
    return made


def again(nights):
    """The service started anew: nothing but the folder is kept."""
    fresh = Nights(nights.results, (2, 0), nights.work, nights.clock)
    fresh.start()
    return fresh


def test_the_first_night_is_the_next_one(nights, work, clock):
    assert nights.run_due() is None
    clock.set("2026-03-02T02:00:00")
    assert nights.run_due() is not None and work.nights == 1


def test_a_night_is_done_once(nights, work, clock):
    clock.set("2026-03-02T02:00:01")
    nights.run_due()
    assert nights.run_due() is None and again(nights).run_due() is None
    clock.set("2026-03-02T23:00:00")
    assert again(nights).run_due() is None and work.nights == 1


def test_a_night_that_crashed_is_done_at_the_next_start(nights, work, clock):
    clock.set("2026-03-02T02:00:01")
    work.dies = True
    with pytest.raises(KeyboardInterrupt):
        nights.run_due()
    work.dies = False
    clock.set("2026-03-02T09:00:00")
    assert again(nights).run_due() is not None
    assert again(nights).run_due() is None and work.nights == 1


def test_missed_nights_are_made_up_for_together(nights, work, clock):
    clock.set("2026-03-06T08:00:00")
    assert again(nights).run_due() is not None
    assert nights.run_due() is None and work.nights == 1
    clock.set("2026-03-07T02:00:00")
    assert nights.run_due() is not None


def test_once_does_not_wait_and_counts_as_the_night_that_is_due(nights, work, clock):
    nights.run_once()
    clock.set("2026-03-02T03:00:00")
    nights.run_once()
    assert nights.run_due() is None and work.nights == 2


def test_each_night_leaves_a_summary(nights, clock):
    clock.set("2026-03-02T02:00:05")
    nights.run_due()
    [facts] = (nights.results.folder / "nights").glob("*.json")
    assert json.loads(facts.read_text())["due"] == "2026-03-02T02:00:00+01:00"
    assert facts.with_suffix(".md").read_text() == "summary\n"


def test_a_second_service_is_refused(tmp_path):
    held = Results(tmp_path).exclusive("nightly")
    with held, pytest.raises(Busy, match="in use by another"), Results(tmp_path).exclusive("nightly"):
        pass


def test_the_service_wakes_at_the_time(nights, work, clock, monkeypatch):
    """APScheduler's own clock is real, so its trigger is replaced by one that is due at once."""
    from apscheduler.schedulers.blocking import BlockingScheduler
    from apscheduler.triggers.interval import IntervalTrigger

    schedulers = []
    start = BlockingScheduler.start
    monkeypatch.setattr(BlockingScheduler, "start", lambda self: (schedulers.append(self), start(self)))
    due, nights.trigger = nights.trigger, IntervalTrigger(seconds=0.01, timezone=ZONE)
    nights.due = lambda: clock.now if not work.nights else None

    def stop(night):
        schedulers and schedulers[0].shutdown(wait=False)

    clock.set("2026-03-01T13:00:00")
    work.nights = 1
    original = nights.run_due
    calls = []

    def run_due():
        calls.append(1)
        if len(calls) == 2:
            work.nights = 0
        return original()

    nights.run_due = run_due
    nights.serve(stop)
    assert work.nights == 1 and len(calls) >= 2 and due


@pytest.mark.parametrize("text", ["25:00", "2", "02:60", "noon"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(BadTime, match="write 02:00"):
        parse_time(text)
