"""What a study looks like right now, from its journal and its runs' heartbeats; for people, decides nothing."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from a3r import supervisor as sv
from a3r.analysis import select
from a3r.goal import At, Criterion, Goal, GoalLock
from a3r.leader import Decision, Plan, parse_step
from a3r.results import read_series
from a3r.store import Store, boot_id, boottime

TERMINAL = ("COMPLETED", "DIVERGED", "FAILED", "CANCELLED", "SUPERSEDED")


@dataclass(frozen=True)
class RunView:
    run: str
    arm: str
    seed: int
    state: str
    attempt: int
    step: int | None
    value: float | None
    """Of a completed run what the goal's criterion takes from it; before, the latest value of its metric."""
    detail: str
    phase: str = ""
    """Of a running attempt: starting, running, finishing."""


@dataclass(frozen=True)
class Snapshot:
    title: str
    question: str
    metric: str
    state: str
    hold: str | None
    stage: int
    plans: list[Plan]
    decision: Decision | None
    runs: list[RunView]
    arms: dict[str, dict[str, Any]]
    budget: list[tuple[str, float, float | None]]
    """(name, used, limit)."""
    waits_for: list[str] = field(default_factory=list)
    waiting_hash: str | None = None


def take(directory: Path, store: Store) -> Snapshot:
    """One look; works beside a running leader."""
    facts, state = store.row("campaign", "facts"), store.row("campaign", "state")
    if facts is None or state is None:
        raise FileNotFoundError(f"{directory}: no study here")
    goal = _goal(json.dumps(facts["lock"], sort_keys=True))
    steps = [_step(json.dumps(r["answer"], sort_keys=True)) for r in store.table("plans").values() if r.get("answer")]
    criterion = goal.question.criterion
    runs = [_view(directory, r, criterion) for r in store.table("runs").values() if r["state"] != "SUPERSEDED"]
    hold = f"{state['hold']['kind'].replace('_', ' ')}: {state['hold']['reason']}" if state["hold"] else None
    waiting = (state.get("waiting") or {}).get("hash") if state["state"] == "AWAIT_APPROVAL" else None
    return Snapshot(
        title=goal.title,
        question=f"{goal.question.type} {goal.question.factor}",
        metric=criterion.address(),
        state=state["state"],
        hold=hold,
        stage=state["stage"],
        plans=[s for s in steps if isinstance(s, Plan)],
        decision=next((s for s in steps if isinstance(s, Decision)), None),
        runs=runs,
        arms=store.table("arms"),
        budget=_budget(directory, store, goal),
        waits_for=_waits_for(store, state, waiting, hold),
        waiting_hash=waiting,
    )


@lru_cache(maxsize=2)
def _goal(text: str) -> Goal:
    return GoalLock.model_validate_json(text).goal


@lru_cache(maxsize=64)
def _step(text: str) -> Plan | Decision:
    return parse_step(json.loads(text))


def _view(directory: Path, run: dict[str, Any], criterion: Criterion) -> RunView:
    folder = directory / "runs" / run["run"] / "attempts" / str(run["attempt"])
    row, phase = {}, ""
    if run["state"] == "RUNNING":
        beat = sv.read_json(folder / "heartbeat") or {}
        row, phase = beat.get("row") or {}, beat.get("state", "starting")
    elif run["state"] in ("COMPLETED", "DIVERGED"):
        row = last_row(folder / "metrics.jsonl")
    value = row.get(criterion.metric)
    if run["state"] == "COMPLETED":
        value = _judged(folder / "metrics.jsonl", criterion.metric, criterion.at.model_dump_json())
    return RunView(
        run=run["run"],
        arm=run["arm"],
        seed=run["seed"],
        state=run["state"],
        attempt=run["attempt"],
        step=row.get("step"),
        value=value if isinstance(value, int | float) else None,
        detail=run["detail"],
        phase=phase,
    )


@lru_cache(maxsize=4096)
def _judged(path: Path, metric: str, at: str) -> float | None:
    """What a completed run is judged by, so that the table and the report say the same; its curve does not change."""
    try:
        series = read_series(path)
    except OSError:
        return None
    return select(series.get(metric, ()), At.model_validate_json(at))


def last_row(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics file."""
    for line in reversed(sv.tail(path, 8192).splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}


def _budget(directory: Path, store: Store, goal: Goal) -> list[tuple[str, float, float | None]]:
    from a3r.campaign import leader_is_running
    from a3r.ledger import wall_of_sessions

    wall_s = wall_of_sessions(store, until_now=leader_is_running(directory))
    rows = list(store.table("spending").values())

    def used(name: str) -> float:
        return sum(float(r.get(name, 0.0)) for r in rows)

    budget = goal.budget
    lines: list[tuple[str, float, float | None]] = [
        ("runs", used("runs"), budget.runs),
        ("wall min", wall_s / 60.0, budget.wall / 60.0 if budget.wall else None),
        ("GPU h", used("gpu_s") / 3600.0, budget.gpu_h),
        ("LLM tokens", used("llm_tokens"), budget.llm_tokens),
        ("USD", used("usd"), budget.usd),
    ]
    return [line for line in lines if line[1] or line[2] is not None]


def _waits_for(store: Store, state: dict[str, Any], waiting: str | None, hold: str | None) -> list[str]:
    """Short sentences on what the study waits for."""
    if hold:
        return [hold]
    if waiting:
        return [f"approval of {waiting[:12]}: `a3r approve` in another terminal"]
    if state["state"] != "RUNNING":
        return []
    runs = list(store.table("runs").values())
    running = sum(r["state"] == "RUNNING" for r in runs)
    queued = [r for r in runs if r["state"] in ("QUEUED", "RETRY_WAIT")]
    out = [f"{running} running"] if running else []
    if queued:
        out.append(f"{len(queued)} waiting")
    for arm, row in store.table("arms").items():
        until = row.get("paused_until")
        if until and until["boot"] == boot_id() and until["boottime"] > boottime():
            out.append(f"{arm} paused for {until['boottime'] - boottime():.0f} s: {until['why']}")
    out += [f"{r['run']}: {r['detail']}" for r in queued if r["state"] == "RETRY_WAIT" and r["detail"]][:3]
    return out


def why_run(directory: Path, store: Store, run: str) -> list[str]:
    """The history of one run as sentences, the latest last."""
    lines = []
    for event in store.events(run=run):
        when = time.strftime("%H:%M:%S", time.localtime(event.at))
        facts = ", ".join(f"{k} {short(v)}" for k, v in event.data.items() if v not in (None, "", {}, []))
        attempt = f" (attempt {event.attempt})" if event.attempt else ""
        lines.append(f"{when}  {event.kind.lower().replace('_', ' ')}{attempt}{': ' + facts if facts else ''}")
    row = store.table("runs")[run]
    if row["state"] in ("QUEUED", "RETRY_WAIT"):
        lines.append(f"now: {row['state'].lower().replace('_', ' ')}; {waiting_reason(store, row)}")
    else:
        lines.append(f"now: {row['state'].lower()}" + (f": {row['detail']}" if row["detail"] else ""))
    return lines


def waiting_reason(store: Store, run: dict[str, Any]) -> str:
    arm = store.row("arms", run["arm"]) or {}
    until = arm.get("paused_until")
    if until and until["boot"] == boot_id() and until["boottime"] > boottime():
        return f"the arm is paused: {until['why']}"
    if run["boot"] == boot_id() and run["not_before"] > boottime():
        return f"it may start in {run['not_before'] - boottime():.0f} s"
    state = store.row("campaign", "state") or {}
    if state.get("hold"):
        return f"the study is held: {state['hold']['reason']}"
    return "waiting for a free slot, or for the leader to run"


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text[:12] if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text
