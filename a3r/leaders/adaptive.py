"""The leader without a model: classical sequential designs, a pure function of goal and history.

Every question starts with a calibration of the noise (stage 0), from which it says, before the rest is spent, what the
budget can answer. Then:

- min/max_that_still: with slots for all levels, a screen of one seed per level and an isotonic fit, else bisection; the
  levels round the crossing are tested at the registered looks until the lower fails and the upper passes; moderators
  are tested round that crossing only; the answer is measured again on fresh seeds.
- best: all levels at the first look, the leading ones on fresh seeds. compare: two arms paired by seed. effect: a
  factorial of the factor and its moderators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from a3r import analysis, statistics
from a3r.analysis import Ladder, arm_name, bar_of, cells, comparison_rules, ladder, make_arm, sample, threshold_rules
from a3r.formats import Scalar, canonical
from a3r.goal import GoalLock
from a3r.leader import Arm, Decision, History, Plan, Purpose, Verdict
from a3r.rules import Rule

DECIDE_OFFSET, CONFIRM_OFFSET = 100, 200
"""Seeds of a screen start at seed_base, those of a test and of a confirmation at these distances from it: fresh."""
FINALISTS = 3
REFERENCE_FACTOR = 2
"""Seeds of the reference arm per seed of a level: every level is compared with it, so its noise counts in all."""


class AdaptiveLeader:
    """See the module."""

    def plan(self, goal: GoalLock, history: History) -> Plan | Decision:
        state = State(goal, history)
        if not history.plans:
            return state.hopeless() or state.calibrate()
        if len(history.plans) >= goal.goal.budget.stages:
            return state.conclude("the budget of stages is used up")
        kind = goal.goal.question.type
        if kind in {"min_that_still", "max_that_still"}:
            return _next_threshold(state)
        return {"best": _next_best, "compare": _next_pairs, "effect": _next_pairs}[kind](state)


@dataclass(frozen=True)
class State:
    """What every question's design needs from goal and history."""

    lock: GoalLock
    history: History

    @property
    def stats(self):
        return self.lock.goal.stats

    @property
    def question(self):
        return self.lock.goal.question

    @property
    def stage(self) -> int:
        return len(self.history.plans)

    def seeds(self, count: int, offset: int = 0) -> list[int]:
        return [self.stats.seed_base + offset + i for i in range(count)]

    # --- money ---------------------------------------------------------------------------------------------------

    def run_seconds(self) -> float:
        """What one run takes: the longest seen, else the blueprint's estimate, else its limit."""
        seen = [o.wall_s for o in self.history.observations if o.wall_s > 0]
        estimate = self.lock.base.estimate
        if seen:
            return max(seen)
        return estimate.run_s if estimate is not None else self.lock.base.timeouts.max_s

    def affordable(self) -> int | None:
        """Runs that the rest of the budget pays for; None is no limit."""
        left, limits = self.history.budget, []
        if left.runs is not None:
            limits.append(left.runs)
        if left.wall_s is not None:
            rounds = math.floor(left.wall_s / self.run_seconds())
            limits.append(rounds * self.history.slots)
        gpus = self.lock.base.resources.gpus
        if left.gpu_s is not None and gpus:
            limits.append(math.floor(left.gpu_s / (gpus * self.run_seconds())))
        return max(0, min(limits)) if limits else None

    def new_runs(self, arms: Iterable[Arm]) -> int:
        done = {(o.arm, o.seed) for o in self.history.observations}
        return sum((arm.name, seed) not in done for arm in arms for seed in arm.seeds)

    def affords(self, arms: Sequence[Arm]) -> bool:
        most = self.affordable()
        return most is None or self.new_runs(arms) <= most

    # --- stages --------------------------------------------------------------------------------------------------

    def arm(
        self, level: Scalar, cell: dict[str, Scalar], seeds: Sequence[int], purpose: Purpose, hypothesis: str = "",
        rules: Sequence[Rule] = (),
    ) -> Arm:  # fmt: skip
        return make_arm(self.lock, level, cell, seeds, purpose, self.stage, hypothesis, rules)

    def conclude(self, *notes: str) -> Decision:
        return analysis.conclude(self.lock, self.history, [n for n in notes if n])

    def anchor(self) -> Scalar:
        """The level whose noise is measured first: the reference, else the one most likely to train."""
        reference = self.question.criterion.reference
        if reference is not None:
            return reference.level
        return self.question.levels[0 if self.question.type in {"max_that_still", "compare"} else -1]

    def smallest_study(self) -> int:
        """Runs without which no verdict can fall: the calibration and two arms at the first look."""
        return self.stats.calibration_seeds + 2 * self.stats.looks[0]

    def hopeless(self) -> Decision | None:
        most = self.affordable()
        if most is None or most >= self.smallest_study():
            return None
        return Decision(
            verdict=Verdict.NOT_MEASURED,
            sentence=f"Not measured: the budget pays for {most} runs and the least is {self.smallest_study()}.",
            notes=["nothing was spent"],
            next=[f"a budget of at least {self.smallest_study()} runs of about {self.run_seconds():.0f} s each"],
        )

    def calibrate(self) -> Plan:
        level, cell = self.anchor(), cells(self.lock.goal)[0]
        count = self.stats.calibration_seeds
        arm = self.arm(level, cell, self.seeds(count), Purpose.CALIBRATE, "the spread between seeds of one arm")
        warnings = []
        most = self.affordable()
        if most is not None and most < self.comfortable():
            warnings.append(
                f"the budget pays for about {most} runs; a study of this question takes up to {self.comfortable()}, "
                "so the answer may stay undecided"
            )
        return Plan(
            stage=0,
            title="calibrate",
            reasoning=f"{count} seeds of {self.question.factor} = {level} measure the noise, from which follows how "
            "many seeds the question needs.",
            arms=[arm],
            warnings=warnings,
        )

    def comfortable(self) -> int:
        """Runs of a study in which two levels need their last look."""
        screen = len(self.question.levels) * self.stats.screen_seeds if _screens(self) else 0
        fresh = self.stats.looks[0] if self.stats.confirm_fresh_seeds else 0
        relative = self.question.type.endswith("still") and bar_of(self.question.criterion).relative
        arms = 3 if relative else 2
        return self.stats.calibration_seeds + screen + arms * self.stats.looks[-1] + fresh

    def power_warnings(self, arms_to_come: int) -> list[str]:
        """What the noise measured so far lets the rest of the budget tell; once, with the plan after calibration."""
        if self.stage != 1:
            return []
        sigma, _ = analysis.noise(self.lock, self.history)
        if sigma is None:
            return ["the calibration left fewer than two values; the noise is unknown"]
        alpha = statistics.look_alphas(self.stats.looks, self.stats.alpha)[-1]
        most = self.affordable()
        per_arm = self.stats.looks[-1] if most is None else min(self.stats.looks[-1], most // max(arms_to_come, 1))
        reach = statistics.margin_reached(sigma, per_arm, alpha)
        margin, what = self._margin()
        if margin is None:
            return [] if math.isfinite(reach) else ["the rest of the budget cannot pay for two seeds per arm"]
        needed = statistics.seeds_needed(sigma * self._spread(), margin, alpha)
        if needed <= per_arm:
            return []
        return [
            f"with a noise of {sigma:.3g} between seeds, {what} of {margin:.3g} needs {needed} seeds per arm; "
            f"{per_arm} can be had, which tell {reach * self._spread():.3g}; the answer may stay undecided"
        ]

    def _spread(self) -> float:
        """How much noisier the contrast is than one arm."""
        question = self.question
        if question.type.endswith("still"):
            bar = bar_of(question.criterion)
            return math.hypot(bar.a, bar.b)
        return math.sqrt(2.0)

    def _margin(self) -> tuple[float | None, str]:
        """The distance that has to be told, as far as it is known before the levels are measured."""
        question, rule = self.question, self.question.criterion.rule
        if rule is None:
            return None, ""
        if rule.margin is not None:
            return rule.margin, "a margin"
        if rule.not_worse_by is not None:
            return rule.not_worse_by, "a margin"
        name = arm_name(self.lock.goal, self.anchor(), cells(self.lock.goal)[0])
        values = sample(self.lock.goal, self.history, name, [o.seed for o in self.history.of(name)]).values
        centre = statistics.mean(values)
        if centre is None:
            return None, ""
        if rule.ratio_at_least is not None:
            return abs(centre * (1.0 - rule.ratio_at_least)), "a distance to the bar"
        bar = bar_of(question.criterion)
        return abs(bar.a * centre + bar.shift), "a distance to the bar"

    def has(self, purpose: Purpose) -> bool:
        return any(arm.purpose is purpose for plan in self.history.plans for arm in plan.arms)

    def calibration_failed(self) -> bool:
        """The first arm left no value although it was run."""
        names = {arm.name for arm in self.history.plans[0].arms}
        seen = [o for o in self.history.observations if o.arm in names]
        goal = self.lock.goal
        return not any(analysis.value_of(o, goal.question.criterion, goal) is not None for o in seen)


# --- min_that_still, max_that_still ----------------------------------------------------------------------------------


def _screens(state: State) -> bool:
    """Whether there are slots for a screen of all levels at once; with few, bisection needs fewer rounds' worth."""
    return state.question.monotone == "unknown" or state.history.slots >= len(state.question.levels)


def _next_threshold(state: State) -> Plan | Decision:
    ladders = [ladder(state.lock, state.history, cell) for cell in cells(state.lock.goal)]
    first = ladders[0]
    if state.stage == 1 and state.calibration_failed():
        return state.conclude("the calibration arm did not complete once, so nothing further was run")
    if _screens(state) and not (state.has(Purpose.SCREEN) or state.has(Purpose.DECIDE)):
        return _screen(state, first)
    tests = {0: _to_test(state, first, None)}
    if not tests[0]:
        start = first.hi if first.settled and not first.crossed else None
        if start is not None:
            tests |= {i: _to_test(state, lad, start) for i, lad in enumerate(ladders[1:], 1)}
    plan = _look(state, ladders, tests)
    if plan is not None:
        return plan
    if any(tests.values()):
        return state.conclude("the rest of the budget does not pay for the next look")
    return confirm(state, first) or state.conclude(_unconfirmed(state, first))


def _screen(state: State, first: Ladder) -> Plan | Decision:
    seeds = state.seeds(state.stats.screen_seeds)
    arms = [
        state.arm(level, dict(first.cell), seeds, Purpose.SCREEN, "where the crossing lies, roughly")
        for level in state.question.levels
    ]
    if not state.affords(arms):
        return state.conclude("the budget does not pay for a screen of the levels")
    return Plan(
        stage=state.stage,
        title="screen",
        reasoning=f"{len(seeds)} seed(s) of every level show where {state.question.factor} crosses; no verdict falls.",
        arms=arms,
        warnings=state.power_warnings(2),
    )


def _to_test(state: State, lad: Ladder, start: int | None) -> list[int]:
    """Positions to put to the next look; empty when this cell is as decided as it can be."""
    spent = lad.passes | lad.fails | lad.exhausted
    everything = [i for i in range(len(lad.levels)) if i not in spent]
    if state.question.monotone == "unknown":
        return everything
    if lad.crossed:
        return [] if state.question.monotone == "required" else everything
    if lad.settled:
        return _suspects(state, lad, spent) if state.question.monotone == "expected" else []
    inside = [i for i in range(lad.lo + 1, lad.hi) if i not in lad.exhausted]
    stuck = [i for i in lad.exhausted if lad.lo < i < lad.hi]
    if stuck:
        above, below = [i for i in inside if i > max(stuck)], [i for i in inside if i < min(stuck)]
        return sorted({*below[-1:], *above[:1]})
    begun = [i for i in inside if i in lad.rows]
    if start is not None or _screens(state):
        crossing = _crossing(state, lad) if start is None or lad.rows else start
        return sorted({i for i in (crossing - 1, crossing) if i in inside} | set(begun)) or inside[:1]
    if begun:
        return begun
    probes = min(max(1, state.history.slots // state.stats.looks[0]), len(inside))
    return sorted({inside[(len(inside) * (k + 1)) // (probes + 1)] for k in range(probes)})


def _crossing(state: State, lad: Ladder) -> int:
    """The position where an isotonic fit of all values seen crosses the bar, kept between the marks."""
    goal, bar = state.lock.goal, bar_of(state.question.criterion)
    reference = analysis.reference_sample(goal, state.history, lad.cell, len(state.history.plans) - 1)
    centre = statistics.mean(reference.values) if reference is not None and bar.relative else 0.0
    heights: list[tuple[int, float, int]] = []
    for i, level in enumerate(lad.levels):
        name = arm_name(goal, level, lad.cell)
        values = sample(goal, state.history, name, [o.seed for o in state.history.of(name)]).values
        average = statistics.mean(values)
        if average is not None and centre is not None:
            heights.append((i, bar.a * average + bar.b * centre + bar.shift, len(values)))
    if not heights:
        return (lad.lo + lad.hi + 1) // 2
    fitted = statistics.isotonic([h for _, h, _ in heights], [float(n) for _, _, n in heights])
    passing = [i for (i, _, _), height in zip(heights, fitted, strict=True) if height > 0]
    return min(max(min(passing, default=len(lad.levels)), lad.lo + 1), lad.hi)


def _suspects(state: State, lad: Ladder, spent: frozenset[int]) -> list[int]:
    """Screened levels that look to be on the wrong side of a settled crossing, beyond what noise explains."""
    goal, bar = state.lock.goal, bar_of(state.question.criterion)
    sigma, found = analysis.noise(state.lock, state.history)
    if not sigma or found is None:
        return []
    df = len(found.src) - len(found.params)
    limit = statistics.t_quantile(max(df, 1), 1 - state.stats.alpha / (2 * len(lad.levels)))
    reference = analysis.reference_sample(goal, state.history, lad.cell, len(state.history.plans) - 1)
    centre = (statistics.mean(reference.values) or 0.0) if reference is not None else 0.0
    out = []
    for i, level in enumerate(lad.levels):
        name = arm_name(goal, level, lad.cell)
        values = sample(goal, state.history, name, [o.seed for o in state.history.of(name)]).values
        if i in spent and i in lad.exhausted:
            continue
        if i in lad.passes or i in lad.fails or not values:
            continue
        height = bar.a * (statistics.mean(values) or 0.0) + bar.b * centre + bar.shift
        wrong = -height if i >= lad.hi else height
        if wrong > limit * sigma * abs(bar.a) / math.sqrt(len(values)):
            out.append(i)
    return out


def _look(state: State, ladders: Sequence[Ladder], tests: dict[int, list[int]]) -> Plan | None:
    """The next look at the positions of each cell; smaller when the budget does not pay for all, None when for none."""
    wanted = [(c, i) for c, positions in tests.items() for i in positions]
    if not wanted:
        return None
    nexts = {(c, i): ladders[c].looks.get(i, -1) + 1 for c, i in wanted}
    at = min(nexts.values())
    chosen = [key for key in wanted if nexts[key] == at]
    while chosen:
        arms = _look_arms(state, ladders, chosen, state.stats.looks[at])
        if state.affords(arms):
            return _look_plan(state, ladders, chosen, arms, at)
        chosen = chosen[:-1]
    return None


def _look_arms(state: State, ladders: Sequence[Ladder], chosen: list[tuple[int, int]], look: int) -> list[Arm]:
    rules = threshold_rules(state.question.criterion)
    arms = []
    for c in sorted({c for c, _ in chosen}):
        cell = dict(ladders[c].cell)
        purpose = Purpose.DECIDE if c == 0 else Purpose.MODERATE
        criterion = state.question.criterion
        if bar_of(criterion).relative and criterion.reference is not None:
            level = criterion.reference.level
            seeds = state.seeds(REFERENCE_FACTOR * look, DECIDE_OFFSET)
            arms.append(state.arm(level, cell, seeds, purpose, "the reference", rules))
        for level in (ladders[c].levels[i] for k, i in chosen if k == c):
            seeds = state.seeds(look + _lost(state, level, cell, look), DECIDE_OFFSET)
            arms.append(state.arm(level, cell, seeds, purpose, _hypothesis(state, level), rules))
    return arms


def _lost(state: State, level: Scalar, cell: dict[str, Scalar], look: int) -> int:
    """Earlier seeds of this arm that left no value and are made up for at this look; at most a quarter of it."""
    name = arm_name(state.lock.goal, level, cell)
    tried = analysis.planned_seeds(state.history, name, [Purpose.DECIDE, Purpose.MODERATE])
    return min(len(sample(state.lock.goal, state.history, name, tried).missing), look // 4)


def _hypothesis(state: State, level: Scalar) -> str:
    return f"{state.question.factor} {level} reaches {analysis.bar_words(state.question.criterion)}"


def _look_plan(
    state: State, ladders: Sequence[Ladder], chosen: list[tuple[int, int]], arms: list[Arm], at: int
) -> Plan:
    look = state.stats.looks[at]
    levels = ", ".join(
        f"{ladders[c].levels[i]}" + "".join(f" at {k} {v}" for k, v in ladders[c].cell.items()) for c, i in chosen
    )
    why = "round the crossing" if _screens(state) else "halves what is left"
    if any(c for c, _ in chosen):
        why = "shows whether the moderator moves the crossing"
    if any(ladders[c].crossed for c, _ in chosen):
        why = "because a level passes below one that fails, so that every level is tested"
    return Plan(
        stage=state.stage,
        title=f"look {look}",
        reasoning=f"{look} fresh seeds of {state.question.factor} {levels}: {why}.",
        arms=arms,
        rules=threshold_rules(state.question.criterion),
        look=look,
        warnings=state.power_warnings(len(arms)),
    )


def confirm(state: State, first: Ladder) -> Plan | None:
    if not _wants_confirmation(state, first):
        return None
    count = state.stats.looks[0]
    level = first.levels[first.hi]
    seeds = state.seeds(count, CONFIRM_OFFSET)
    arm = state.arm(
        level, dict(first.cell), seeds, Purpose.CONFIRM, "the answer's value holds on seeds that did not choose it"
    )
    if not state.affords([arm]):
        return None
    return Plan(
        stage=state.stage,
        title="confirm",
        reasoning=f"{count} fresh seeds of the answer, {state.question.factor} {level}: the value to report.",
        arms=[arm],
    )


def _wants_confirmation(state: State, first: Ladder) -> bool:
    settled = first.settled and not first.crossed and first.hi < len(first.levels)
    return settled and state.stats.confirm_fresh_seeds and not state.has(Purpose.CONFIRM)


def _unconfirmed(state: State, first: Ladder) -> str:
    if _wants_confirmation(state, first):
        return "the rest of the budget did not pay for a confirmation of the value on fresh seeds"
    return ""


# --- best ------------------------------------------------------------------------------------------------------------


def _next_best(state: State) -> Plan | Decision:
    if state.stage == 1 and state.calibration_failed():
        return state.conclude("the calibration arm did not complete once, so nothing further was run")
    cell = cells(state.lock.goal)[0]
    if not state.has(Purpose.SCREEN):
        seeds = state.seeds(state.stats.looks[0])
        arms = [state.arm(level, cell, seeds, Purpose.SCREEN, "how the levels rank") for level in state.question.levels]
        if not state.affords(arms):
            return state.conclude("the budget does not pay for a screen of the levels")
        return Plan(
            stage=state.stage, title="screen", arms=arms,
            reasoning=f"{len(seeds)} seeds of every level rank them; no verdict falls.",
            warnings=state.power_warnings(FINALISTS),
        )  # fmt: skip
    finalists = _finalists(state, cell)
    if len(finalists) < 2:
        return state.conclude("fewer than two levels could be measured")
    done = [plan.look for plan in state.history.plans if plan.look is not None]
    if done:
        _, rows = analysis.judge_best(state.lock, state.history, len(state.history.plans) - 1)
        if not any(row.mark == "undecided" for row in rows):
            return state.conclude()
    return _next_look(state, [(level, cell) for level in finalists], len(done))


def _finalists(state: State, cell: dict[str, Scalar]) -> list[Scalar]:
    """The leading levels of the screen, best first, at most FINALISTS."""
    goal = state.lock.goal
    sign = 1.0 if goal.question.criterion.better == "higher" else -1.0
    means: list[tuple[float, int, Scalar]] = []
    for i, level in enumerate(goal.question.levels):
        name = arm_name(goal, level, cell)
        purposes = [Purpose.SCREEN, Purpose.CALIBRATE]
        values = sample(goal, state.history, name, analysis.planned_seeds(state.history, name, purposes)).values
        average = statistics.mean(values)
        if average is not None:
            means.append((-sign * average, i, level))
    means.sort(key=lambda m: m[:2])
    return [level for _, _, level in means[:FINALISTS]]


# --- compare, effect -------------------------------------------------------------------------------------------------


def _next_pairs(state: State) -> Plan | Decision:
    if state.stage == 1 and state.calibration_failed():
        return state.conclude("the calibration arm did not complete once, so nothing further was run")
    done = [plan.look for plan in state.history.plans if plan.look is not None]
    if done:
        index = len(state.history.plans) - 1
        if state.question.type == "compare":
            marks = [row.mark for row in analysis.judge_compare(state.lock, state.history, index)[1:]]
        else:
            marks = [row.mark for row in analysis.judge_effect(state.lock, state.history, index)[0]]
        if marks and "undecided" not in marks:
            return state.conclude()
    arms = [(level, cell) for cell in cells(state.lock.goal) for level in state.question.levels]
    return _next_look(state, arms, len(done))


def _next_look(state: State, wanted: list[tuple[Scalar, dict[str, Scalar]]], at: int) -> Plan | Decision:
    """All arms at the next registered look, paired by seed."""
    if at >= len(state.stats.looks):
        return state.conclude()
    look = state.stats.looks[at]
    rule = state.question.criterion.rule
    rules = comparison_rules(rule.margin if rule is not None else None)
    offset = DECIDE_OFFSET if state.question.type == "best" else 0
    seeds = state.seeds(look, offset)
    arms = [state.arm(level, cell, seeds, Purpose.DECIDE, "differs from the others", rules) for level, cell in wanted]
    if not state.affords(arms):
        return state.conclude("the rest of the budget does not pay for the next look")
    names = ", ".join(dict.fromkeys(canonical(level).strip('"') for level, _ in wanted))
    return Plan(
        stage=state.stage,
        title=f"look {look}",
        reasoning=f"{look} seeds of {state.question.factor} {names}, paired by seed.",
        arms=arms,
        rules=rules,
        look=look,
        warnings=state.power_warnings(len(arms)),
    )
