"""Every night's benchmark: what is due is derived from the record of finished nights, so none is lost or done twice.

A night is written down as finished only after its session has ended. APScheduler says when the next one is due and
wakes the service; at every start the service first does what is due, so that a crash in the middle of a night, or a
machine that was off, costs nothing but time: nights that were missed together are one run, since a run measures every
new commit. (A job store of APScheduler's own moves a job on before it runs, which would lose a night that crashes.)
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from a3r import supervisor as sv
from a3r.bench.session import Exit
from a3r.bench.store import Results

RECORD = "nights.json"


@dataclass(frozen=True)
class Night:
    """What one night came to."""

    exit: Exit
    commits: tuple[str, ...]
    markdown: str


Work = Callable[[], Night]
Clock = Callable[[], dt.datetime]


def local_now() -> dt.datetime:
    return dt.datetime.now().astimezone()


class BadTime(ValueError):
    """Not a time of day."""


def parse_time(text: str) -> tuple[int, int]:
    """`02:00` → (2, 0).

    Raises:
        BadTime
    """
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text)
    if not found:
        raise BadTime(f"--at {text!r} is not a time of day; write 02:00")
    return int(found[1]), int(found[2])


class Nights:
    """The nights of one results folder. The caller holds the `nightly` lock."""

    def __init__(self, results: Results, at: tuple[int, int], work: Work, clock: Clock = local_now) -> None:
        from apscheduler.triggers.cron import CronTrigger

        self.results = results
        self.work = work
        self.clock = clock
        self.trigger = CronTrigger(hour=at[0], minute=at[1], timezone=clock().tzinfo)

    # -- what is due

    def record(self) -> dict[str, Any]:
        return sv.read_json(self.results.folder / RECORD) or {"schema": "a3r/nights/v1", "finished_until": None}

    def due(self) -> dt.datetime | None:
        """The latest night that has begun and is not finished; None when all are, or before the first."""
        text = self.record()["finished_until"]
        after = dt.datetime.fromisoformat(text) if text else None
        if after is None:
            return None
        latest, now = None, self.clock()
        moment = self.trigger.get_next_fire_time(None, after + dt.timedelta(seconds=1))
        while moment is not None and moment <= now:
            latest = moment
            moment = self.trigger.get_next_fire_time(None, moment + dt.timedelta(seconds=1))
        return latest

    def start(self) -> None:
        """Nights count from the first start of the service."""
        if self.record()["finished_until"] is None:
            self._finish_until(self.clock())

    # -- doing it

    def run_due(self) -> Night | None:
        """Do the night that is due, if one is."""
        moment = self.due()
        return self._do(moment) if moment is not None else None

    def run_once(self) -> Night:
        """Do a night now, due or not."""
        return self._do(self.due() or self.clock())

    def _do(self, moment: dt.datetime) -> Night:
        night = self.work()
        self._keep(moment, night)
        self._finish_until(moment)
        return night

    def serve(self, on_night: Callable[[Night], None] = lambda _: None) -> None:
        """Do what is due now, then every night's, until interrupted."""
        from apscheduler.schedulers.blocking import BlockingScheduler

        self.start()

        def tick() -> None:
            if night := self.run_due():
                on_night(night)

        tick()
        scheduler = BlockingScheduler(timezone=self.trigger.timezone)
        scheduler.add_job(tick, self.trigger, coalesce=True, max_instances=1, misfire_grace_time=None)
        scheduler.start()

    def _keep(self, moment: dt.datetime, night: Night) -> None:
        """The summary of a night, by the moment it was due."""
        folder = self.results.folder / "nights"
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{moment:%Y-%m-%dT%H%M%S}"
        facts = {"schema": "a3r/night/v1", "due": moment.isoformat(), "ended": self.clock().isoformat()}
        facts |= {"exit": int(night.exit), "commits": list(night.commits)}
        sv.replace_file(folder / f"{stem}.md", night.markdown)
        sv.replace_file(folder / f"{stem}.json", sv.result_text(facts))

    def _finish_until(self, moment: dt.datetime) -> None:
        text = json.dumps(self.record() | {"finished_until": moment.isoformat()}, indent=1) + "\n"
        sv.replace_file(self.results.folder / RECORD, text)
