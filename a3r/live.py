"""What a person sees while a study runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from a3r import snapshot

if TYPE_CHECKING:
    from a3r.study import Study

MARKS = {
    "QUEUED": ("·", "dim"),
    "RETRY_WAIT": ("↻", "yellow"),
    "RUNNING": ("▶", "cyan"),
    "COMPLETED": ("✓", "green"),
    "DIVERGED": ("≈", "magenta"),
    "FAILED": ("✗", "red"),
    "CANCELLED": ("–", "dim"),
}
DRAW_S = 1.0
MOST_TITLE = 80
WIDE_SEEDS = 6
"""More seeds than this are shown by their marks only."""
QUIET = {
    "LEADER_STARTED", "LEADER_LEFT", "PLAN_ASKED", "LLM_ASKED", "LLM_ANSWERED", "ATTEMPT_RUNNING", "STAGE_ANALYSED",
    "COMMAND",
}  # fmt: skip


def render(snap: snapshot.Snapshot, warnings: list[str] | None = None) -> Group:
    """Header, stages, arms × seeds, budget, and what is waited for."""
    state = snap.hold or snap.state.lower().replace("_", " ")
    title = snap.title if len(snap.title) <= MOST_TITLE else snap.title[: MOST_TITLE - 1] + "…"
    head = Text.assemble((title, "bold"), f"   {snap.question}   ", (state, "yellow" if snap.hold else "cyan"))
    parts: list[Any] = [head, stages(snap), grid(snap)]
    if snap.budget:
        parts.append(Text("budget  " + "   ".join(budget_words(b) for b in snap.budget), style="dim"))
    if snap.waits_for:
        parts.append(Text("waits for  " + " · ".join(snap.waits_for), style="yellow" if snap.hold else ""))
    parts += [Text(f"! {w}", style="yellow") for w in (warnings or [])[-3:]]
    return Group(*parts)


def stages(snap: snapshot.Snapshot) -> Text:
    text = Text("stages  ")
    for number, plan in enumerate(snap.plans):
        current = number == snap.stage and snap.state in ("DECLARING", "RUNNING", "ANALYSING", "AWAIT_APPROVAL")
        text.append(f"{number} {plan.title}", style="bold cyan" if current else "green")
        text.append("  →  " if number + 1 < len(snap.plans) else "")
    return text


def grid(snap: snapshot.Snapshot) -> Table:
    """Arms × seeds: a mark, the step, and the latest value of the metric; many seeds are shown by their marks."""
    seeds = sorted({r.seed for r in snap.runs})
    by_arm: dict[str, dict[int, snapshot.RunView]] = {}
    for run in snap.runs:
        by_arm.setdefault(run.arm, {})[run.seed] = run
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("arm", no_wrap=True, overflow="fold")
    wide = len(seeds) <= WIDE_SEEDS
    for title in [f"s{seed}" for seed in seeds] if wide else ["runs"]:
        table.add_column(title, justify="right" if wide else "left")
    table.add_column("mean", justify="right")
    for arm, runs in by_arm.items():
        done = [r.value for r in runs.values() if r.state == "COMPLETED" and r.value is not None]
        mean = f"{sum(done) / len(done):.3f}" if done else ""
        blocked = snap.arms.get(arm, {}).get("blocked")
        cells = [cell(runs.get(s)) for s in seeds]
        row = cells if wide else [Text.assemble(*(brief(r) for _, r in sorted(runs.items())))]
        table.add_row(Text(arm, style="red" if blocked else ""), *row, mean)
    return table


def cell(run: snapshot.RunView | None) -> Text:
    if run is None:
        return Text("")
    mark, style = MARKS.get(run.state, ("?", ""))
    value = "" if run.value is None else f" {run.value:.3f}"
    step = f" {run.step}" if run.state == "RUNNING" and run.step is not None else ""
    return Text(f"{mark}{step}{value}", style=style)


def brief(run: snapshot.RunView) -> Text:
    """A mark; of a running run its step and value too."""
    mark, style = MARKS.get(run.state, ("?", ""))
    if run.state != "RUNNING" or run.value is None:
        return Text(mark, style=style)
    return Text(f" {mark}{run.step} {run.value:.3f} ", style=style)


def budget_words(line: tuple[str, float, float | None]) -> str:
    name, used, limit = line
    return f"{name} {rounded(used)}" + (f"/{rounded(limit)}" if limit is not None else "")


def rounded(value: float) -> str:
    """To a hundredth, without zeros at the end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class LiveView:
    """A table that is drawn anew every DRAW_S: more often would cost the trainings CPU time."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.drawn = 0.0

    def __call__(self, study: Study) -> None:
        if time.monotonic() - self.drawn < DRAW_S and study.state != "DONE":
            return
        self.drawn = time.monotonic()
        snap = snapshot.take(study.directory, study.store)
        self.live.update(Panel(render(snap, study.warnings), border_style="dim"), refresh=True)


class LineView:
    """One line for each event that matters."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seen = 0
        self.warned = 0

    def __call__(self, study: Study) -> None:
        for event in study.store.events(after=self.seen):
            self.seen = event.seq
            if event.kind not in QUIET:
                self.console.print(event_line(event), markup=False, highlight=False, soft_wrap=True)
        for warning in study.warnings[self.warned :]:
            self.console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
        self.warned = len(study.warnings)


def event_line(event: Any) -> str:
    """`12:03:04 run completed x1.0/s2 (attempt 1): steps 12, wall_s 93.1`."""
    when = time.strftime("%H:%M:%S", time.localtime(event.at))
    where = f" {event.run}" if event.run else ""
    attempt = f" (attempt {event.attempt})" if event.attempt and event.attempt > 1 else ""
    facts = ", ".join(f"{k} {snapshot.short(v)}" for k, v in event.data.items() if v not in (None, "", {}, []))
    return f"{when} {event.kind.lower().replace('_', ' ')}{where}{attempt}{': ' + facts if facts else ''}"


@contextlib.contextmanager
def viewing(console: Console) -> Iterator[LiveView | LineView]:
    """A live table on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield LineView(console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield LiveView(live)
