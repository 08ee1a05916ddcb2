"""The figures of a report, as SVG text. The same study gives the same bytes: no dates, fixed identifiers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from a3r.analysis import bar_of, cells, describe, sample
from a3r.leader import ArmRow, Decision
from a3r.results import RunStatus

if TYPE_CHECKING:
    from a3r.report import Evidence

MARKS = {
    "passes": "#1b7f4d", "best": "#1b7f4d", "better": "#1b7f4d", "equivalent": "#1b7f4d", "reference": "#2f5fa7",
    "fails": "#b3372f", "worse": "#b3372f", "undecided": "#c08a16", "leads": "#c08a16",
}  # fmt: skip
GREY = "#8b95a1"
MOST_CURVES = 10


def draw(evidence: Evidence, decision: Decision) -> dict[str, str]:
    """File name → SVG."""
    drawings: dict[str, Callable[[Any, Evidence, Decision], None]] = {
        "curves.svg": _curves,
        "ladder.svg": _ladder,
        "cost.svg": _cost,
    }
    return {name: _svg(name, function, evidence, decision) for name, function in drawings.items()}


def _svg(name: str, function: Callable[[Any, Evidence, Decision], None], evidence: Evidence, decision: Decision) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": f"a3r-{name}", "svg.fonttype": "path", "font.size": 9.0, "axes.spines.top": False,
        "axes.spines.right": False, "axes.edgecolor": "#5b6675", "axes.titlesize": 10.0, "legend.frameon": False,
        "legend.fontsize": 8.0,
    }  # fmt: skip
    with rc_context(settings):
        figure = Figure(figsize=(5.2, 4.0), layout="constrained")
        function(figure.subplots(), evidence, decision)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def _label(evidence: Evidence, name: str) -> str:
    """Level and moderator levels only; the axis says of what."""
    for plan in evidence.history.plans:
        for arm in plan.arms:
            if arm.name == name:
                return " / ".join(str(v) for v in (arm.level, *arm.cell.values()))
    return name


def _factors(evidence: Evidence) -> str:
    question = evidence.lock.goal.question
    return " / ".join([question.factor, *(m.factor for m in question.moderators)])


def _arms_in_order(evidence: Evidence) -> list[str]:
    """Arm names with observations, by level and cell."""
    order: dict[str, tuple[Any, ...]] = {}
    levels, every = evidence.lock.goal.question.levels, cells(evidence.lock.goal)
    for plan in evidence.history.plans:
        for arm in plan.arms:
            order[arm.name] = (every.index(dict(arm.cell)), levels.index(arm.level))
    seen = {o.arm for o in evidence.history.observations}
    return sorted((name for name in order if name in seen), key=lambda name: order[name])


def _curves(axes: Any, evidence: Evidence, decision: Decision) -> None:
    from matplotlib import colormaps

    metric = evidence.lock.goal.question.criterion.metric
    by_arm = {
        name: [dict(o.series[metric]) for o in evidence.history.of(name) if o.series.get(metric)]
        for name in _arms_in_order(evidence)
    }
    by_arm = {name: runs for name, runs in by_arm.items() if runs}
    names = sorted(by_arm, key=lambda n: -len(by_arm[n]))[:MOST_CURVES]
    names = [n for n in by_arm if n in names]
    palette = colormaps["viridis"]
    for i, name in enumerate(names):
        colour = palette(0.05 + 0.85 * i / max(len(names) - 1, 1))
        runs = by_arm[name]
        steps = sorted({step for run in runs for step in run})
        rows = [[run[s] for run in runs if s in run] for s in steps]
        axes.plot(
            steps,
            [math.fsum(r) / len(r) for r in rows],
            color=colour,
            label=f"{_label(evidence, name)} (n={len(runs)})",
            lw=1.6,
        )
        axes.fill_between(steps, [min(r) for r in rows], [max(r) for r in rows], color=colour, alpha=0.15, lw=0)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    if names:
        axes.legend(title=_factors(evidence), ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    if len(by_arm) > len(names):
        axes.set_title(f"the {len(names)} arms with most runs of {len(by_arm)}")


def _ladder(axes: Any, evidence: Evidence, decision: Decision) -> None:
    rows = [row for row in decision.table if row.numbers.get("n") and row.numbers["n"].v]
    labels: list[str] = []
    for i, row in enumerate(rows):
        colour = MARKS.get(row.mark, GREY)
        low, high, middle = (row.numbers.get(k) for k in ("ci_low", "ci_high", "mean"))
        for value in _values(evidence, row):
            axes.plot([value], [i], "|", color=colour, ms=7, alpha=0.55)
        if low is not None and high is not None and low.v is not None and high.v is not None:
            axes.plot([low.v, high.v], [i, i], color=colour, lw=2.2, solid_capstyle="butt", alpha=0.8)
        if middle is not None and middle.v is not None:
            axes.plot([middle.v], [i], "o", color=colour, ms=5)
        labels.append(f"{_label(evidence, row.arm)}  {row.mark}")
    axes.set_yticks(range(len(rows)), labels)
    axes.set_title(_factors(evidence), loc="left")
    axes.invert_yaxis()
    axes.set_xlabel(evidence.lock.goal.question.criterion.address())
    _zoom(axes, [v for row in rows for v in _values(evidence, row)])
    bar = _bar_value(evidence)
    if bar is not None:
        axes.axvline(bar, color="#1c2430", ls="--", lw=1)


def _zoom(axes: Any, values: Sequence[float]) -> None:
    """Show all values; intervals of two or three seeds may run out of the picture."""
    if not values:
        return
    low, high = min(values), max(values)
    room = max(high - low, 1e-9) * 0.35
    left, right = axes.get_xlim()
    axes.set_xlim(max(left, low - room), min(right, high + room))


def _values(evidence: Evidence, row: ArmRow) -> list[float]:
    return [evidence.value(address) for address in row.numbers["n"].src]


def _bar_value(evidence: Evidence) -> float | None:
    """Where the bar stands on the metric's axis; None where no single value says it."""
    goal = evidence.lock.goal
    criterion = goal.question.criterion
    if not goal.question.type.endswith("still"):
        return None
    bar = bar_of(criterion)
    if not bar.relative:
        return -bar.shift / bar.a
    arms = [
        a
        for p in evidence.history.plans
        for a in p.arms
        if criterion.reference and a.level == criterion.reference.level
    ]
    if not arms or goal.question.moderators:
        return None
    name = arms[0].name
    own = sample(goal, evidence.history, name, [o.seed for o in evidence.history.of(name)])
    centre = describe(own, goal.stats.alpha)["mean"].v
    return None if centre is None else -(bar.b * centre + bar.shift) / bar.a


def _cost(axes: Any, evidence: Evidence, decision: Decision) -> None:
    stage_of = {o.run: o.stage for o in evidence.history.observations}
    good: dict[int, float] = {}
    bad: dict[int, float] = {}
    for (run, _), record in evidence.records.items():
        kind = good if record.status is RunStatus.COMPLETED else bad
        stage = stage_of.get(run, 0)
        kind[stage] = kind.get(stage, 0.0) + record.usage.wall_s
    stages: list[int] = [plan.stage for plan in evidence.history.plans]
    titles: Mapping[int, str] = {plan.stage: f"{plan.stage}: {plan.title}" for plan in evidence.history.plans}
    axes.bar([titles[s] for s in stages], [good.get(s, 0.0) for s in stages], color="#2f5fa7", label="completed")
    axes.bar(
        [titles[s] for s in stages], [bad.get(s, 0.0) for s in stages], bottom=[good.get(s, 0.0) for s in stages],
        color="#b3372f", label="failed",
    )  # fmt: skip
    axes.set_ylabel("seconds")
    axes.tick_params(axis="x", rotation=30)
    axes.legend()
