"""Which commit a confirmed change came with, by measuring as few runs as the noise allows.

Every fresh value counts: for each possible first changed commit, the values split into before and after, and the share
of their scatter that the split leaves tells how well it fits. The commit that halves the remaining probability is
measured next. Knows nothing of git and measures nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from a3r.bench.verdicts import Change

Observation = tuple[int, float]
"""(position in the list of commits, value turned so that larger is worse)."""


@dataclass(frozen=True)
class Located:
    """Where the change is."""

    position: int
    """Of the first changed commit."""
    probability: float
    runs: int
    """Values measured for it, beyond those given."""
    sure: bool


def posterior(observations: Sequence[Observation], count: int, change: Change) -> list[float]:
    """Probability of each of the positions 1 … count-1 to be the first changed one (index 0 is always 0).

    The marginal likelihood of each split, its two means and the noise integrated out under flat priors.
    """
    total = len(observations)
    logs = [-math.inf] * count
    for first in range(1, count):
        left = [v for i, v in observations if i < first]
        right = [v for i, v in observations if i >= first]
        if not left or not right:
            continue
        shift = change.sign * (_mean(right) - _mean(left))
        if shift <= 0:
            continue
        scatter = _scatter(left) + _scatter(right) + 1e-12 * shift * shift
        logs[first] = -0.5 * ((total - 2) * math.log(scatter) + math.log(len(left) * len(right)))
    top = max(logs)
    if top == -math.inf:
        return [0.0] + [1.0 / (count - 1)] * (count - 1)
    weights = [math.exp(x - top) for x in logs]
    return [w / math.fsum(weights) for w in weights]


def locate(
    count: int,
    known: Sequence[Observation],
    measure: Callable[[int], Sequence[float]],
    change: Change,
    sure: float = 0.99,
    most_runs: int = 200,
) -> Located:
    """Find the first changed of `count` commits; position 0 is good, the last is changed.

    Args:
        known: fresh values of both ends, at least.
        measure: more values of the commit at a position, turned so that larger is worse.
    """
    observations = list(known)
    spent = 0
    while True:
        chances = posterior(observations, count, change)
        best = max(range(count), key=chances.__getitem__)
        if chances[best] >= sure or count == 2:
            return Located(best, chances[best], spent, True)
        if spent >= most_runs:
            return Located(best, chances[best], spent, False)
        probe = _halving(chances)
        values = measure(probe)
        spent += len(values)
        observations += [(probe, v) for v in values]


def _halving(chances: Sequence[float]) -> int:
    """The position whose answer is the most open: as likely before the change as after it."""
    reached, best, gap = 0.0, 1, math.inf
    for position, chance in enumerate(chances):
        reached += chance
        if 0 < position < len(chances) - 1 and abs(reached - 0.5) < gap:
            best, gap = position, abs(reached - 0.5)
    return best


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _scatter(values: Sequence[float]) -> float:
    centre = _mean(values)
    return math.fsum((v - centre) ** 2 for v in values)
