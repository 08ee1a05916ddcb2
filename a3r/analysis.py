"""From runs to verdicts: which values count, which rule fired, what the answer is. Leaders plan; this decides.

Only completed runs are observations (diverged ones where the goal says so). A mark falls at a registered look, by the
stage's registered rules, over exactly the seeds which that stage listed; Holm's step-down over the levels tested
together sets each interval's alpha. A mark that has fallen stays. Numbers carry their sources' addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from a3r import statistics
from a3r.blueprint import Blueprint
from a3r.formats import Scalar, canonical
from a3r.goal import At, Criterion, Goal, GoalLock
from a3r.leader import Arm, ArmRow, CellAnswer, Decision, History, Number, Plan, Purpose, Verdict
from a3r.results import Observation, RunStatus, Series
from a3r.rules import Rule, fired, otherwise, when
from a3r.statistics import FUNCTIONS, look_alphas

Cell = Mapping[str, Scalar]
FLOOR_SHARE = 0.5


# --- values and their addresses --------------------------------------------------------------------------------------


def select(series: Series, at: At) -> float | None:
    """The part of a curve a criterion means; None when the curve does not reach it."""
    if at.step is not None:
        return next((value for step, value in series if step == at.step), None)
    if at.last_k is None:
        return series[-1][1] if series else None
    if len(series) < at.last_k:
        return None
    tail = [value for _, value in series[-at.last_k :]]
    chosen = {"mean": statistics.mean, "median": statistics.median, "max": max, "min": min}[at.stat]
    return chosen(tail)


def value_of(observation: Observation, criterion: Criterion, goal: Goal) -> float | None:
    """The run's value for the criterion; None: the run is no observation."""
    if observation.status is RunStatus.DIVERGED and goal.stats.diverged == "observation":
        return goal.stats.diverged_value
    if observation.status is not RunStatus.COMPLETED:
        return None
    if criterion.metric in observation.evals:
        return observation.evals[criterion.metric]
    return select(observation.series.get(criterion.metric, ()), criterion.at)


def exclusion(observation: Observation) -> str:
    """Why a run is no observation, in a word or two."""
    if observation.failure_class is not None:
        return observation.failure_class.value
    return "no value at the selector" if observation.status is RunStatus.COMPLETED else observation.status.value.lower()


@dataclass(frozen=True)
class Sample:
    """The observations of one arm over a list of seeds."""

    arm: str
    seeds: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    addresses: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Run → why it is no observation."""

    def paired(self, other: Sample) -> tuple[Sample, Sample]:
        """Both, restricted to the seeds they share."""
        shared = sorted(set(self.seeds) & set(other.seeds))
        return self.only(shared), other.only(shared)

    def only(self, seeds: Iterable[int]) -> Sample:
        at = [self.seeds.index(s) for s in seeds]
        return Sample(
            self.arm,
            tuple(self.seeds[i] for i in at),
            tuple(self.values[i] for i in at),
            tuple(self.addresses[i] for i in at),
            self.missing,
        )


def sample(goal: Goal, history: History, arm: str, seeds: Iterable[int]) -> Sample:
    criterion = goal.question.criterion
    by_seed = {o.seed: o for o in history.observations if o.arm == arm}
    kept: list[tuple[int, float, str]] = []
    missing: dict[str, str] = {}
    for seed in sorted(set(seeds)):
        observation = by_seed.get(seed)
        if observation is None:
            missing[f"{arm}/s{seed}"] = "not run"
            continue
        value = value_of(observation, criterion, goal)
        if value is None:
            missing[observation.run] = exclusion(observation)
        else:
            kept.append((seed, value, f"{observation.run}:{criterion.address()}"))
    columns = list(zip(*kept, strict=True)) or [(), (), ()]
    return Sample(arm, columns[0], columns[1], columns[2], missing)


def number(fn: str, x: Sample, y: Sample | None = None, **params: float) -> Number:
    y_values = y.values if y else ()
    return Number(
        v=FUNCTIONS[fn](x.values, y_values, params),
        fn=fn,
        src=list(x.addresses),
        ref=list(y.addresses) if y else [],
        params=params,
    )


# --- arms ------------------------------------------------------------------------------------------------------------


def arm_name(goal: Goal, level: Scalar, cell: Cell) -> str:
    """`lr=1e-06` or `batch_size=16+max_response=4000`: short, and fit for a path."""
    parts = {goal.question.factor: level, **cell}
    return "+".join(f"{key.rsplit('.', 1)[-1][:32]}={_short(value)}" for key, value in parts.items())


def _short(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:.12g}" if isinstance(value, int | float) else value
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in text)[:24]


def make_arm(
    lock: GoalLock,
    level: Scalar,
    cell: Cell,
    seeds: Sequence[int],
    purpose: Purpose,
    stage: int,
    hypothesis: str = "",
    rules: Sequence[Rule] = (),
) -> Arm:
    """The base blueprint with the factor and the moderators set."""
    goal = lock.goal
    blueprint: Blueprint = lock.base.sealed(
        name=arm_name(goal, level, cell),
        stage=stage,
        hypothesis=hypothesis,
        preregistered=[rule.model_dump(mode="json", by_alias=True) for rule in rules],
        seeds=list(seeds),
        config={**lock.base.config, goal.question.factor: level, **cell},
    )
    return Arm(blueprint=blueprint, level=level, cell=dict(cell), purpose=purpose)


def cells(goal: Goal) -> list[dict[str, Scalar]]:
    """Combinations of the moderators' levels, the first levels first; one empty cell without moderators."""
    out: list[dict[str, Scalar]] = [{}]
    for moderator in goal.question.moderators:
        out = [cell | {moderator.factor: level} for cell in out for level in moderator.levels]
    return out


def planned_seeds(history: History, arm: str, purposes: Iterable[Purpose], upto: int | None = None) -> list[int]:
    """Seeds that plans before index `upto` (all when None) listed for an arm for one of the purposes."""
    wanted = set(purposes)
    plans = history.plans if upto is None else history.plans[:upto]
    return sorted({s for plan in plans for a in plan.arms if a.name == arm and a.purpose in wanted for s in a.seeds})


# --- the bar of min/max_that_still -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """`a·arm + b·reference + shift`: positive means the level passes."""

    a: float
    b: float
    shift: float

    @property
    def relative(self) -> bool:
        return self.b != 0.0

    floor: float = 0.0
    """Least standard deviation to assume within an arm."""

    def params(self, alpha: float) -> dict[str, float]:
        return {"a": self.a, "b": self.b, "shift": self.shift, "alpha": alpha, "floor": self.floor}


def bar_of(criterion: Criterion) -> Bar:
    rule = criterion.rule
    if rule is None:
        raise ValueError("a threshold question without a rule; compile the goal again")
    sign = 1.0 if criterion.better == "higher" else -1.0
    if rule.at_least is not None:
        return Bar(1.0, 0.0, -rule.at_least)
    if rule.at_most is not None:
        return Bar(-1.0, 0.0, rule.at_most)
    if rule.not_worse_by is not None:
        return Bar(sign, -sign, rule.not_worse_by)
    ratio = rule.ratio_at_least or 1.0
    return Bar(1.0, -ratio, 0.0) if sign > 0 else Bar(-ratio, 1.0, 0.0)


def metric_words(criterion: Criterion) -> str:
    at = criterion.at
    if at.step is not None:
        return f"{criterion.metric} at step {at.step}"
    if at.last_k is None or at.last_k == 1:
        return f"final {criterion.metric}"
    return f"{criterion.metric} ({at.stat} of the last {at.last_k} steps)"


def bar_words(criterion: Criterion) -> str:
    """`a reward/mean (mean of the last 2 steps) of at least 0.6`."""
    rule = criterion.rule
    name = metric_words(criterion)
    if rule is None:
        return name
    if rule.at_least is not None:
        return f"a {name} of at least {rule.at_least:g}"
    if rule.at_most is not None:
        return f"a {name} of at most {rule.at_most:g}"
    level = criterion.reference.level if criterion.reference else "?"
    if rule.not_worse_by is not None:
        return f"a {name} not worse than that of {level} by {rule.not_worse_by:g}"
    if rule.ratio_at_least is not None:
        return f"{rule.ratio_at_least:g} times the {name} of {level}"
    return name


def threshold_rules(criterion: Criterion) -> list[Rule]:
    """The outcome → mark map of one level, as registered. `diff` is the arm against the reference, larger is better."""
    rule = criterion.rule
    if rule is not None and rule.at_least is not None:
        low, high = f"ci_low(arm) > {rule.at_least!r}", f"ci_high(arm) < {rule.at_least!r}"
    elif rule is not None and rule.at_most is not None:
        low, high = f"ci_high(arm) < {rule.at_most!r}", f"ci_low(arm) > {rule.at_most!r}"
    else:
        margin = rule.not_worse_by if rule is not None and rule.not_worse_by is not None else None
        bound = f"{-margin!r}" if margin is not None else "0"
        low, high = f"ci_low(diff) > {bound}", f"ci_high(diff) < {bound}"
    return [
        when(low, "passes", "look for the crossing below"),
        when(high, "fails", "look for the crossing above"),
        otherwise("undecided", "add seeds up to the next look, else leave it open"),
    ]


def reference_sample(goal: Goal, history: History, cell: Cell, upto: int) -> Sample | None:
    """All seeds of the reference arm that were not chosen for their results, up to and with plan `upto`."""
    reference = goal.question.criterion.reference
    if reference is None:
        return None
    name = arm_name(goal, reference.level, cell)
    purposes = (Purpose.CALIBRATE, Purpose.SCREEN, Purpose.DECIDE, Purpose.MODERATE)
    return sample(goal, history, name, planned_seeds(history, name, purposes, upto + 1))


def judge(lock: GoalLock, history: History, index: int) -> list[ArmRow]:
    """The marks that fell at plan `index` of a threshold question: one row per arm under test."""
    goal, plan = lock.goal, history.plans[index]
    if plan.look is None:
        return []
    by_cell: dict[str, list[Arm]] = {}
    for arm in plan.arms:
        if arm.purpose in {Purpose.DECIDE, Purpose.MODERATE} and not _is_reference(goal, arm):
            by_cell.setdefault(canonical(arm.cell), []).append(arm)
    return [row for arms in by_cell.values() for row in _judge_cell(lock, history, index, arms)]


def _is_reference(goal: Goal, arm: Arm) -> bool:
    criterion = goal.question.criterion
    return criterion.reference is not None and bar_of(criterion).relative and arm.level == criterion.reference.level


def _judge_cell(lock: GoalLock, history: History, index: int, arms: list[Arm]) -> list[ArmRow]:
    goal, plan = lock.goal, history.plans[index]
    bar = replace(bar_of(goal.question.criterion), floor=noise_floor(lock, history, plan.stage))
    reference = reference_sample(goal, history, arms[0].cell, index) if bar.relative else None
    samples = [sample(goal, history, arm.name, arm.seeds) for arm in arms]
    spend = alpha_at(goal, plan)
    p_values = [number("diff_p", s, reference, **bar.params(spend)).v for s in samples]
    order = sorted(range(len(arms)), key=lambda i: (p_values[i] if p_values[i] is not None else 2.0, i))
    rows: dict[int, ArmRow] = {}
    left, stopped = len(arms), False
    for i in order:
        alpha = spend / left
        row = _row(lock, plan, arms[i], samples[i], reference, alpha, bar, history)
        # Holm: from the first undecided level on, alpha stays; weaker results than that one cannot pass it.
        stopped = stopped or row.mark not in {"passes", "fails"}
        left -= 0 if stopped else 1
        rows[i] = row
    return [rows[i] for i in range(len(arms))]


def alpha_at(goal: Goal, plan: Plan) -> float:
    """The two-sided error this look may spend."""
    looks = goal.stats.looks
    shares = look_alphas(looks, goal.stats.alpha)
    return shares[looks.index(plan.look)] if plan.look in looks else min(shares)


def _row(
    lock: GoalLock,
    plan: Plan,
    arm: Arm,
    own: Sample,
    reference: Sample | None,
    alpha: float,
    bar: Bar,
    history: History,
) -> ArmRow:
    rules = plan.rules or threshold_rules(lock.goal.question.criterion)
    numbers = _numbers(own, reference, alpha, bar)
    mark, rule = mark_of(rules, numbers)
    return ArmRow(
        arm=arm.name,
        level=arm.level,
        cell=arm.cell,
        mark=mark,
        rule=rule,
        look=plan.look,
        planned=len(arm.seeds),
        numbers=numbers,
        excluded=dict(own.missing),
        robust=_robust(lock, history, own, reference, alpha, bar, rules, mark),
    )


def _numbers(own: Sample, reference: Sample | None, alpha: float, bar: Bar) -> dict[str, Number]:
    out = describe(own, alpha, bar.floor)
    if bar.relative and reference is not None:
        plain = bar.params(alpha) | {"shift": 0.0}
        for name, fn in (("diff", "diff"), ("diff_low", "diff_low"), ("diff_high", "diff_high")):
            out[name] = number(fn, own, reference, **plain)
    out["p"] = number("diff_p", own, reference if bar.relative else None, **bar.params(alpha))
    return out


def describe(own: Sample, alpha: float, floor: float = 0.0) -> dict[str, Number]:
    return {
        "n": number("n", own),
        "mean": number("mean", own),
        "sd": number("sd", own),
        "median": number("median", own),
        "ci_low": number("ci_low", own, alpha=alpha, floor=floor),
        "ci_high": number("ci_high", own, alpha=alpha, floor=floor),
    }


_RULE_NAMES = {
    "n": "n(arm)", "mean": "mean(arm)", "sd": "sd(arm)", "median": "median(arm)", "ci_low": "ci_low(arm)",
    "ci_high": "ci_high(arm)", "diff": "mean(diff)", "diff_low": "ci_low(diff)", "diff_high": "ci_high(diff)",
}  # fmt: skip


def mark_of(rules: Sequence[Rule], numbers: Mapping[str, Number]) -> tuple[str, str]:
    """(mark, the rule that fired); undecided when a number it needs cannot be computed."""
    values = {_RULE_NAMES[k]: n.v for k, n in numbers.items() if k in _RULE_NAMES and n.v is not None}
    needed = {"ci_low(arm)", "ci_high(arm)"} | ({"ci_low(diff)", "ci_high(diff)"} if "diff_low" in numbers else set())
    if not needed <= set(values):
        empty = not numbers["n"].v
        return ("not measured", "no observation") if empty else ("undecided", "fewer than two observations")
    found = fired(list(rules), values)
    if found is None:
        return "undecided", "no rule fired"
    index, outcome = found
    return outcome.mark, rules[index].if_ or "otherwise"


def _robust(
    lock: GoalLock, history: History, own: Sample, reference: Sample | None, alpha: float, bar: Bar,
    rules: Sequence[Rule], mark: str,
) -> bool | None:  # fmt: skip
    """Whether the mark survives the missing runs being the worst or the best value seen anywhere."""
    if not own.missing or mark not in {"passes", "fails"}:
        return None
    goal = lock.goal
    seen = [v for o in history.observations if (v := value_of(o, goal.question.criterion, goal)) is not None]
    for extreme in (min(seen), max(seen)):
        filled = Sample(own.arm, own.seeds, (*own.values, *[extreme] * len(own.missing)), own.addresses)
        if mark_of(rules, _numbers(filled, reference, alpha, bar))[0] != mark:
            return False
    return True


# --- where the search stands -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ladder:
    """Marks of one cell by position; position 0 is the end where levels are expected to fail."""

    cell: Cell
    levels: tuple[Scalar, ...]
    rows: Mapping[int, ArmRow] = field(default_factory=dict)
    passes: frozenset[int] = frozenset()
    fails: frozenset[int] = frozenset()
    exhausted: frozenset[int] = frozenset()
    """Undecided after the last look, or not measurable."""
    looks: Mapping[int, int] = field(default_factory=dict)
    """Position → index of the last look it has had."""

    @property
    def lo(self) -> int:
        """Highest position that fails; -1 when none does."""
        return max(self.fails, default=-1)

    @property
    def hi(self) -> int:
        """Lowest position that passes; the number of levels when none does."""
        return min(self.passes, default=len(self.levels))

    @property
    def crossed(self) -> bool:
        """A level passes although a later one fails."""
        return self.hi < self.lo

    @property
    def settled(self) -> bool:
        return self.hi == self.lo + 1


def ladder(lock: GoalLock, history: History, cell: Cell) -> Ladder:
    goal = lock.goal
    question = goal.question
    levels = tuple(question.levels) if question.type == "min_that_still" else tuple(reversed(question.levels))
    rows: dict[int, ArmRow] = {}
    looks: dict[int, int] = {}
    key = canonical(dict(cell))
    for index, plan in enumerate(history.plans):
        for row in judge(lock, history, index):
            if canonical(row.cell) != key:
                continue
            at = levels.index(row.level)
            looks[at] = max(
                looks.get(at, -1), goal.stats.looks.index(plan.look) if plan.look in goal.stats.looks else 0
            )
            if at not in rows or rows[at].mark not in {"passes", "fails"}:
                rows[at] = row
    passes = {i for i, row in rows.items() if row.mark == "passes"}
    criterion = question.criterion
    if bar_of(criterion).relative and criterion.reference is not None:
        passes.add(levels.index(criterion.reference.level))
    last = len(goal.stats.looks) - 1
    exhausted = {
        i for i, row in rows.items() if row.mark == "not measured" or (row.mark == "undecided" and looks[i] >= last)
    }
    fails = {i for i, row in rows.items() if row.mark == "fails"}
    return Ladder(cell, levels, rows, frozenset(passes), frozenset(fails), frozenset(exhausted), looks)


def noise_floor(lock: GoalLock, history: History, stage: int) -> float:
    """The least standard deviation a test at `stage` assumes: a share of what was seen within arms up to then.

    Three values that happen to lie close together would otherwise decide a question on their own.
    """
    known = replace(history, observations=tuple(o for o in history.observations if o.stage <= stage))
    return FLOOR_SHARE * (noise(lock, known)[0] or 0.0)


def noise(lock: GoalLock, history: History) -> tuple[float | None, Number | None]:
    """Pooled standard deviation within arms over all seeds, and the same as an addressed number."""
    goal = lock.goal
    names = sorted({o.arm for o in history.observations})
    groups = [sample(goal, history, name, [o.seed for o in history.of(name)]) for name in names]
    usable = [g for g in groups if len(g.values) >= 2]
    if not usable:
        return None, None
    joined = Sample(
        "all",
        values=tuple(v for g in usable for v in g.values),
        addresses=tuple(a for g in usable for a in g.addresses),
    )
    found = number("pooled_sd", joined, None, **{f"g{i}": float(len(g.values)) for i, g in enumerate(usable)})
    return found.v, found


# --- the answer ------------------------------------------------------------------------------------------------------


def conclude(lock: GoalLock, history: History, notes: Sequence[str] = ()) -> Decision:
    """The decision that the runs so far support, whoever planned them."""
    kind = lock.goal.question.type
    if kind in {"min_that_still", "max_that_still"}:
        decision = _conclude_threshold(lock, history)
    elif kind == "best":
        decision = _conclude_best(lock, history)
    elif kind == "compare":
        decision = _conclude_compare(lock, history)
    else:
        decision = _conclude_effect(lock, history)
    deviations = [d for plan in history.plans for d in plan.deviations]
    updates: dict[str, Any] = {
        "notes": [*decision.notes, *deviations, *notes],
        "noise": noise(lock, history)[1],
    }
    return decision.model_copy(update=updates)


def _conclude_threshold(lock: GoalLock, history: History) -> Decision:
    goal = lock.goal
    ladders = [ladder(lock, history, cell) for cell in cells(goal)]
    answers = [cell_answer(goal, lad) for lad in ladders]
    first = answers[0]
    headline, selected = _headline(lock, history, first)
    notes, verdict, sentence = [], first.verdict, first.sentence
    if headline is not None and verdict is Verdict.SUPPORTED and _contradicts(lock, history, first):
        verdict = Verdict.UNDECIDED
        notes.append("the fresh seeds contradict the seeds that chose the level; the answer is withdrawn")
        sentence = f"{sentence} Fresh seeds contradict this, so it is not claimed."
    if len(answers) > 1:
        sentence = f"{sentence} {influence(goal, answers)}"
    return Decision(
        verdict=verdict,
        sentence=sentence,
        level=first.level if verdict is Verdict.SUPPORTED else None,
        answers=answers,
        table=_threshold_table(lock, history, ladders),
        headline=headline,
        selected=selected,
        notes=notes + _missing_notes(ladders),
        next=_next_steps(goal, answers),
    )


def cell_answer(goal: Goal, lad: Ladder) -> CellAnswer:
    question = goal.question
    words = "smallest" if question.type == "min_that_still" else "largest"
    where = "".join(f" at {k} {v}" for k, v in lad.cell.items())
    bar = bar_words(question.criterion)
    levels, lo, hi = lad.levels, lad.lo, lad.hi
    beyond = "smaller" if words == "smallest" else "larger"

    def answer(verdict: Verdict, sentence: str, level: Scalar | None = None) -> CellAnswer:
        low = levels[lo] if 0 <= lo < len(levels) else None
        high = levels[hi] if 0 <= hi < len(levels) else None
        return CellAnswer(cell=dict(lad.cell), verdict=verdict, level=level, lo=low, hi=high, sentence=sentence)

    if not lad.rows:
        return answer(Verdict.NOT_MEASURED, f"Not measured{where}: no level was tested.")
    if lad.crossed:
        passing = ", ".join(str(levels[i]) for i in sorted(lad.passes))
        failing = ", ".join(str(levels[i]) for i in sorted(lad.fails))
        return answer(
            Verdict.NON_MONOTONE,
            f"{question.factor} has no single threshold{where}: {passing} pass and {failing} fail ({bar}).",
        )
    if lad.settled and hi == len(levels):
        return answer(Verdict.REFUTED, f"No tested {question.factor} up to {levels[-1]}{where} reaches {bar}.")
    if lad.settled and hi == 0:
        return answer(
            Verdict.SUPPORTED,
            f"The {words} tested {question.factor}{where}, {levels[0]}, already reaches {bar}; "
            f"{beyond} ones were not tested.",
            levels[0],
        )
    if lad.settled:
        return answer(
            Verdict.SUPPORTED,
            f"The {words} {question.factor} that still reaches {bar}{where} is {levels[hi]} ({levels[lo]} does not).",
            levels[hi],
        )
    if not lad.fails and not lad.passes and all(row.mark == "not measured" for row in lad.rows.values()):
        return answer(Verdict.NOT_MEASURED, f"Not measured{where}: no run of a tested level completed.")
    low = str(levels[lo]) if lo >= 0 else f"below {levels[0]}"
    high = str(levels[hi]) if hi < len(levels) else f"beyond {levels[-1]}"
    return answer(
        Verdict.UNDECIDED,
        f"The {words} {question.factor} that still reaches {bar}{where} lies between {low} (excluded) and {high}; "
        "these seeds cannot say where.",
    )


def influence(goal: Goal, answers: Sequence[CellAnswer]) -> str:
    """What the moderators do to the answer, in a sentence."""
    names = ", ".join(m.factor for m in goal.question.moderators)
    firm = [a for a in answers if a.verdict in {Verdict.SUPPORTED, Verdict.REFUTED}]
    if len({canonical(a.level) for a in firm}) > 1:
        parts = "; ".join(f"{_cell_words(a.cell)}: {a.level if a.level is not None else 'none'}" for a in firm)
        return f"{names} influences that value ({parts})."
    if len(firm) == len(answers):
        return f"{names} does not change that value at the tested levels."
    return f"Whether {names} influences that value is undecided."


def _cell_words(cell: Cell) -> str:
    return ", ".join(f"{k} {v}" for k, v in cell.items()) or "all"


def _headline(lock: GoalLock, history: History, first: CellAnswer) -> tuple[Number | None, Number | None]:
    """(mean on the seeds of confirmation, mean on the seeds that chose the level)."""
    if first.level is None:
        return None, None
    name = arm_name(lock.goal, first.level, first.cell)
    fresh = sample(lock.goal, history, name, planned_seeds(history, name, [Purpose.CONFIRM]))
    chose = sample(lock.goal, history, name, planned_seeds(history, name, [Purpose.DECIDE, Purpose.MODERATE]))
    return (number("mean", fresh) if fresh.values else None), (number("mean", chose) if chose.values else None)


def _contradicts(lock: GoalLock, history: History, first: CellAnswer) -> bool:
    """The confirmation alone would have marked the level as failing."""
    goal, bar = lock.goal, bar_of(lock.goal.question.criterion)
    if first.level is None:
        return False
    name = arm_name(goal, first.level, first.cell)
    fresh = sample(goal, history, name, planned_seeds(history, name, [Purpose.CONFIRM]))
    reference = reference_sample(goal, history, first.cell, len(history.plans) - 1) if bar.relative else None
    high = number("diff_high", fresh, reference, **bar.params(goal.stats.alpha)).v
    return high is not None and high < 0.0


def _threshold_table(lock: GoalLock, history: History, ladders: Sequence[Ladder]) -> list[ArmRow]:
    goal = lock.goal
    out: list[ArmRow] = []
    for lad in ladders:
        for level in goal.question.levels:
            at = lad.levels.index(level)
            row = lad.rows.get(at) or _untested_row(lock, history, level, lad)
            if row is not None:
                out.append(row)
    return out


def _untested_row(lock: GoalLock, history: History, level: Scalar, lad: Ladder) -> ArmRow | None:
    """A level that was screened or calibrated, or is the reference, but not put to a test."""
    goal = lock.goal
    name = arm_name(goal, level, lad.cell)
    own = sample(goal, history, name, [o.seed for o in history.of(name)])
    if not own.values and not own.missing:
        return None
    reference = goal.question.criterion.reference
    is_reference = reference is not None and reference.level == level and bar_of(goal.question.criterion).relative
    return ArmRow(
        arm=name,
        level=level,
        cell=dict(lad.cell),
        mark="reference" if is_reference else "screened only",
        rule="passes by definition" if is_reference else "no look",
        planned=len(own.values) + len(own.missing),
        numbers=describe(own, goal.stats.alpha),
        excluded=dict(own.missing),
    )


def _missing_notes(ladders: Sequence[Ladder]) -> list[str]:
    return [
        f"the mark of {row.arm} would not survive the worst or best value in its {len(row.excluded)} missing run(s)"
        for lad in ladders
        for row in lad.rows.values()
        if row.robust is False
    ]


def _next_steps(goal: Goal, answers: Sequence[CellAnswer]) -> list[str]:
    out = []
    for answer in answers:
        where = f" at {_cell_words(answer.cell)}" if answer.cell else ""
        if answer.verdict is Verdict.UNDECIDED:
            out.append(f"more seeds between {answer.lo} and {answer.hi}{where}, or a wider margin")
        elif answer.verdict is Verdict.SUPPORTED and answer.lo is None:
            out.append(f"levels of {goal.question.factor} beyond {answer.level}{where}")
        elif answer.verdict is Verdict.SUPPORTED:
            out.append(f"levels of {goal.question.factor} between {answer.lo} and {answer.level}{where}")
        elif answer.verdict is Verdict.REFUTED:
            out.append(f"levels of {goal.question.factor} outside the tested range{where}, or a lower bar")
    return out


# --- best ------------------------------------------------------------------------------------------------------------


def comparison_rules(margin: float | None) -> list[Rule]:
    """The outcome → mark map of a difference; larger is better."""
    out = []
    if margin is not None:
        out.append(when(f"ci_low(diff) > {-margin!r} and ci_high(diff) < {margin!r}", "equivalent", "stop"))
    return [
        *out,
        when("ci_low(diff) > 0", "better", "stop"),
        when("ci_high(diff) < 0", "worse", "stop"),
        otherwise("undecided", "add seeds up to the next look, else leave it open"),
    ]


def _margin(goal: Goal) -> float | None:
    rule = goal.question.criterion.rule
    return rule.margin if rule is not None else None


def _oriented(goal: Goal, better: Sample, other: Sample) -> tuple[Sample, Sample]:
    """Such that first minus second is positive when the first is better."""
    pair = better.paired(other)
    return pair if goal.question.criterion.better == "higher" else (pair[1], pair[0])


def pair_row(
    lock: GoalLock, plan: Plan, arm: Arm, own: Sample, other: Sample, alpha: float, rules: Sequence[Rule]
) -> ArmRow:
    """`own` against `other`, paired by seed."""
    x, y = _oriented(lock.goal, own, other)
    numbers = describe(own, alpha) | {
        "diff": number("paired", x, y),
        "diff_low": number("paired_low", x, y, alpha=alpha),
        "diff_high": number("paired_high", x, y, alpha=alpha),
        "p": number("paired_p", x, y, alpha=alpha),
    }
    mark, rule = mark_of(rules, numbers)
    return ArmRow(
        arm=arm.name, level=arm.level, cell=arm.cell, mark=mark, rule=rule, look=plan.look, planned=len(arm.seeds),
        numbers=numbers, excluded=dict(own.missing),
    )  # fmt: skip


def _last_look(history: History) -> int | None:
    """Index of the newest plan at which a verdict could fall."""
    return next((i for i in range(len(history.plans) - 1, -1, -1) if history.plans[i].look is not None), None)


def _deciding(plan: Plan) -> list[Arm]:
    return [arm for arm in plan.arms if arm.purpose in {Purpose.DECIDE, Purpose.MODERATE}]


def judge_best(lock: GoalLock, history: History, index: int) -> tuple[Arm | None, list[ArmRow]]:
    """The leading finalist of a look, and every other one's row against it (`worse`, `equivalent`, `undecided`)."""
    goal, plan = lock.goal, history.plans[index]
    arms = _deciding(plan)
    samples = {arm.name: sample(goal, history, arm.name, arm.seeds) for arm in arms}
    measured = [arm for arm in arms if samples[arm.name].values]
    if not measured:
        return None, []
    sign = 1.0 if goal.question.criterion.better == "higher" else -1.0
    leader = max(measured, key=lambda a: sign * (statistics.mean(samples[a.name].values) or 0.0))
    others = [arm for arm in measured if arm is not leader]
    rules = plan.rules or comparison_rules(_margin(goal))
    spend = alpha_at(goal, plan)
    p = {
        a.name: pair_row(lock, plan, a, samples[a.name], samples[leader.name], spend, rules).numbers["p"].v
        for a in others
    }
    rows, left, stopped = {}, len(others), False
    for arm in sorted(others, key=lambda a: 2.0 if (found := p[a.name]) is None else found):
        row = pair_row(lock, plan, arm, samples[arm.name], samples[leader.name], spend / max(left, 1), rules)
        # An arm that does better than the leader by mean cannot exist; "better" never fires here.
        stopped = stopped or row.mark == "undecided"
        left -= 0 if stopped else 1
        rows[arm.name] = row
    top = ArmRow(
        arm=leader.name, level=leader.level, cell=leader.cell, mark="leads", look=plan.look, planned=len(leader.seeds),
        numbers=describe(samples[leader.name], spend), excluded=dict(samples[leader.name].missing),
    )  # fmt: skip
    return leader, [top if arm is leader else rows[arm.name] for arm in measured]


def _conclude_best(lock: GoalLock, history: History) -> Decision:
    goal, index = lock.goal, _last_look(history)
    factor, metric = goal.question.factor, metric_words(goal.question.criterion)
    screened = _screen_rows(lock, history, set())
    if index is None:
        return _not_measured(screened)
    leader, rows = judge_best(lock, history, index)
    if leader is None:
        return _not_measured(screened)
    open_rows = [row for row in rows if row.mark == "undecided"]
    equal = [row for row in rows if row.mark == "equivalent"]
    table = [row for row in rows] + _screen_rows(lock, history, {row.arm for row in rows})
    decide = sample(goal, history, leader.name, planned_seeds(history, leader.name, [Purpose.DECIDE]))
    screen = sample(
        goal, history, leader.name, planned_seeds(history, leader.name, [Purpose.SCREEN, Purpose.CALIBRATE])
    )
    names = ", ".join(str(row.level) for row in open_rows)
    if open_rows:
        verdict = Verdict.UNDECIDED
        sentence = f"{factor} {leader.level} leads in {metric}, but {names} cannot be told from it with these seeds."
    else:
        verdict = Verdict.SUPPORTED
        tie = f"; {', '.join(str(r.level) for r in equal)} are within the margin" if equal else ""
        sentence = f"The best tested {factor} in {metric} is {leader.level}{tie}."
    return Decision(
        verdict=verdict,
        sentence=sentence,
        level=leader.level if verdict is Verdict.SUPPORTED else None,
        table=[
            row.model_copy(update={"mark": "best"}) if row.mark == "leads" and verdict is Verdict.SUPPORTED else row
            for row in table
        ],
        headline=number("mean", decide) if decide.values else None,
        selected=number("mean", screen) if screen.values else None,
        next=[f"more seeds of {leader.level} and {names}"]
        if open_rows
        else [f"levels of {factor} around {leader.level}"],
    )


def _screen_rows(lock: GoalLock, history: History, without: set[str]) -> list[ArmRow]:
    goal = lock.goal
    out = []
    for cell in cells(goal):
        for level in goal.question.levels:
            name = arm_name(goal, level, cell)
            own = sample(goal, history, name, [o.seed for o in history.of(name)])
            if name not in without and (own.values or own.missing):
                out.append(
                    ArmRow(
                        arm=name, level=level, cell=cell, mark="screened only" if own.values else "not measured",
                        rule="no look", planned=len(own.values) + len(own.missing),
                        numbers=describe(own, goal.stats.alpha), excluded=dict(own.missing),
                    )
                )  # fmt: skip
    return out


def _not_measured(table: list[ArmRow]) -> Decision:
    return Decision(
        verdict=Verdict.NOT_MEASURED,
        sentence="Not measured: no registered look was reached with a completed run.",
        table=table,
        next=["repair what made the runs fail, or raise the budget"],
    )


# --- compare and effect ----------------------------------------------------------------------------------------------


def judge_compare(lock: GoalLock, history: History, index: int) -> list[ArmRow]:
    """Two rows: the first level as the reference, the second against it."""
    goal, plan = lock.goal, history.plans[index]
    by_level = {canonical(arm.level): arm for arm in _deciding(plan)}
    first, second = (by_level.get(canonical(level)) for level in goal.question.levels)
    if first is None or second is None:
        return []
    samples = [sample(goal, history, arm.name, arm.seeds) for arm in (first, second)]
    alpha = alpha_at(goal, plan)
    base = ArmRow(
        arm=first.name, level=first.level, mark="reference", look=plan.look, planned=len(first.seeds),
        numbers=describe(samples[0], alpha), excluded=dict(samples[0].missing),
    )  # fmt: skip
    rules = plan.rules or comparison_rules(_margin(goal))
    return [base, pair_row(lock, plan, second, samples[1], samples[0], alpha, rules)]


def _conclude_compare(lock: GoalLock, history: History) -> Decision:
    goal, index = lock.goal, _last_look(history)
    rows = judge_compare(lock, history, index) if index is not None else []
    if not rows or rows[1].mark == "not measured":
        return _not_measured(rows or _screen_rows(lock, history, set()))
    a, b = goal.question.levels
    metric, factor, mark = metric_words(goal.question.criterion), goal.question.factor, rows[1].mark
    sentences = {
        "better": (Verdict.SUPPORTED, f"{factor} {b} is better than {a} in {metric}."),
        "worse": (Verdict.SUPPORTED, f"{factor} {a} is better than {b} in {metric}."),
        "equivalent": (
            Verdict.SUPPORTED,
            f"{factor} {a} and {b} differ by less than {_margin(goal) or 0:g} in {metric}.",
        ),
        "undecided": (Verdict.UNDECIDED, f"These seeds cannot tell {factor} {a} from {b} in {metric}."),
    }
    verdict, sentence = sentences.get(mark, sentences["undecided"])
    level = {"better": b, "worse": a}.get(mark)
    return Decision(
        verdict=verdict,
        sentence=sentence,
        level=level,
        table=rows,
        headline=rows[1].numbers["diff"],
        tests={"p": rows[1].numbers["p"]},
        next=[] if verdict is Verdict.SUPPORTED else ["more seeds, or a wider margin"],
    )


def judge_effect(lock: GoalLock, history: History, index: int) -> tuple[list[ArmRow], dict[str, Number]]:
    """Rows of every level against the first one over all cells, and the interaction with the first moderator."""
    goal, plan = lock.goal, history.plans[index]
    arms = {(canonical(a.level), canonical(a.cell)): a for a in _deciding(plan)}
    rules = plan.rules or comparison_rules(_margin(goal))
    first, *others = goal.question.levels
    spend = alpha_at(goal, plan) / len(others)
    base = _over_cells(lock, history, arms, first)
    rows: list[ArmRow] = []
    for level in others:
        own = _over_cells(lock, history, arms, level)
        x, y = _paired_cells(own, base)
        if goal.question.criterion.better == "lower":
            x, y = y, x
        numbers = describe(x, spend) | {
            "diff": number("paired", x, y),
            "diff_low": number("paired_low", x, y, alpha=spend),
            "diff_high": number("paired_high", x, y, alpha=spend),
            "p": number("paired_p", x, y, alpha=spend),
        }
        mark, rule = mark_of(rules, numbers)
        excluded = {run: why for s in own for run, why in s.missing.items()}
        rows.append(
            ArmRow(
                arm=f"{goal.question.factor}={_short(level)} over all cells", level=level, mark=mark, rule=rule,
                look=plan.look, planned=sum(len(s.seeds) + len(s.missing) for s in own), numbers=numbers,
                excluded=excluded,
            )
        )  # fmt: skip
    return rows, _interaction(goal, base, _over_cells(lock, history, arms, others[-1]), spend)


def _over_cells(lock: GoalLock, history: History, arms: Mapping[tuple[str, str], Arm], level: Scalar) -> list[Sample]:
    out = []
    for cell in cells(lock.goal):
        arm = arms.get((canonical(level), canonical(cell)))
        if arm is not None:
            out.append(sample(lock.goal, history, arm.name, arm.seeds))
    return out


def _paired_cells(own: Sequence[Sample], base: Sequence[Sample]) -> tuple[Sample, Sample]:
    pairs = [a.paired(b) for a, b in zip(own, base, strict=False)]
    return _joined([a for a, _ in pairs]), _joined([b for _, b in pairs])


def _joined(samples: Sequence[Sample]) -> Sample:
    return Sample(
        "+".join(s.arm for s in samples),
        seeds=tuple(x for s in samples for x in s.seeds),
        values=tuple(x for s in samples for x in s.values),
        addresses=tuple(x for s in samples for x in s.addresses),
    )


def _interaction(goal: Goal, low: Sequence[Sample], high: Sequence[Sample], alpha: float) -> dict[str, Number]:
    """Does the first moderator change the factor's effect? First against last of its levels."""
    if not goal.question.moderators or len(low) < 2 or len(high) < 2:
        return {}
    ll, lh, hl, hh = low[0], low[-1], high[0], high[-1]
    shared = sorted(set(ll.seeds) & set(lh.seeds) & set(hl.seeds) & set(hh.seeds))
    if len(shared) < 2:
        return {}
    # x = [high factor at high moderator, low at low], y = [low at high, high at low]: see statistics.interactions
    x, y = _joined([hh.only(shared), ll.only(shared)]), _joined([lh.only(shared), hl.only(shared)])
    params = {"k": float(len(shared)), "alpha": alpha}
    return {
        "interaction": number("interaction", x, y, **params),
        "interaction_low": number("interaction_low", x, y, **params),
        "interaction_high": number("interaction_high", x, y, **params),
        "interaction_p": number("interaction_p", x, y, **params),
    }


def _conclude_effect(lock: GoalLock, history: History) -> Decision:
    goal, index = lock.goal, _last_look(history)
    screened = _screen_rows(lock, history, set())
    if index is None:
        return _not_measured(screened)
    rows, tests = judge_effect(lock, history, index)
    if not rows or all(row.mark == "not measured" for row in rows):
        return _not_measured(screened)
    factor, metric = goal.question.factor, metric_words(goal.question.criterion)
    marks = {row.mark for row in rows}
    if marks & {"better", "worse"}:
        verdict, sentence = Verdict.SUPPORTED, f"{factor} influences {metric}."
    elif marks == {"equivalent"}:
        verdict = Verdict.REFUTED
        sentence = f"{factor} does not influence {metric} by {_margin(goal) or 0:g} or more at the tested levels."
    else:
        verdict, sentence = Verdict.UNDECIDED, f"Whether {factor} influences {metric} is undecided with these seeds."
    low, high = tests.get("interaction_low"), tests.get("interaction_high")
    if low is not None and high is not None and low.v is not None and high.v is not None:
        moderator = goal.question.moderators[0].factor
        found = "changes" if low.v > 0 or high.v < 0 else "was not found to change"
        sentence += f" {moderator} {found} that effect."
    strongest = min(rows, key=lambda r: r.numbers["p"].v if r.numbers["p"].v is not None else 2.0)
    return Decision(
        verdict=verdict,
        sentence=sentence,
        table=rows + screened,
        headline=strongest.numbers["diff"],
        tests=tests,
        next=[] if verdict is not Verdict.UNDECIDED else ["more seeds, or a wider margin"],
    )
