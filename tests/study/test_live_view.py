"""What a person sees: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import time

import pytest
from campaigns import base_blueprint, goal_lock
from rich.console import Console
from test_campaign import tick_until

from a3r import snapshot
from a3r.analysis import select
from a3r.ledger import wall_of_sessions
from a3r.live import LineView, render, viewing
from a3r.results import read_series


@pytest.fixture
def study(campaign):
    """A campaign in its middle: one run done, others running or waiting."""
    directory = campaign.create(lock=goal_lock(base_blueprint(config={"step_s": 0.1}), budget={"runs": 40}))
    found = campaign.open(directory)
    tick_until(found, lambda: any(r["state"] == "COMPLETED" for r in found.runs().values()), "one is done")
    tick_until(found, lambda: found.open_attempts(), "others run")
    yield found
    (directory / "inbox" / "stop").write_text("{}")
    found.run()
    found.close()


def printed(renderable, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_stages_arms_rewards_budget_and_what_is_waited_for(study):
    text = printed(render(snapshot.take(study.directory, study.store), ["a warning"]))
    for part in (
        "smallest x that still works",
        "0 stage 0",
        "x0.1",
        "✓",
        "s1",
        "runs ",
        "/40",
        "waits for",
        "! a warning",
    ):
        assert part in text


def test_wall_time_goes_on_between_events_while_a_leader_runs(study):
    before, after = wall_of_sessions(study.store), wall_of_sessions(study.store, until_now=True)
    assert after > before
    assert wall_of_sessions(study.store, until_now=True) > after
    shown = {name: used for name, used, _ in snapshot.take(study.directory, study.store).budget}
    assert shown["wall min"] * 60 > after


def test_a_completed_run_shows_what_the_criterion_takes_from_it(study):
    shown = next(r for r in snapshot.take(study.directory, study.store).runs if r.state == "COMPLETED")
    criterion = study.goal.goal.question.criterion
    series = read_series(study.directory / "runs" / shown.run / "attempts" / "1" / "metrics.jsonl")[criterion.metric]
    assert shown.value == select(series, criterion.at)
    assert len({value for _, value in series}) > 1


def test_the_time_since_the_last_event_counts_when_a_leader_is_left(study):
    before = wall_of_sessions(study.store)
    time.sleep(0.2)
    study.leave()
    assert wall_of_sessions(study.store) >= before + 0.2


def test_a_terminal_gets_a_table_and_a_file_gets_lines(study):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with viewing(screen) as look:
        look(study)
    assert "stages" in screen.file.getvalue()  # type: ignore[attr-defined]
    lines = Console(file=io.StringIO(), width=200)
    with viewing(lines) as look:
        assert isinstance(look, LineView)
        look(study)
        look(study)
    text = lines.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("stage declared") == 1 and "run completed" in text


def test_why_says_what_a_run_waits_for(study):
    waiting = next(r["run"] for r in study.runs().values() if r["state"] == "QUEUED")
    assert "waiting for a free slot" in snapshot.why_run(study.directory, study.store, waiting)[-1]
    finished = next(r["run"] for r in study.runs().values() if r["state"] == "COMPLETED")
    assert snapshot.why_run(study.directory, study.store, finished)[-1] == "now: completed"
