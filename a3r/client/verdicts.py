"""Whether a policy beats the random baseline: a paired comparison over the same tasks and seeds.

A stub wins when the lower end of the one-sided t interval of its mean advantage is above a margin. The intervals of all
stubs of a check hold together at `ALPHA` (Bonferroni). The margin is `MARGIN` of what there is to win: from the
baseline to the good answers, or, where none are declared, between the lowest and the highest reward seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from a3r.statistics import mean, paired, sd, t_quantile

ALPHA = 0.05
"""Chance that a check whose stubs are all within the margin refuses one of them."""
MARGIN = 0.1
FIRST_LOOK = 16
"""Episodes after which a stub that is not ahead of the baseline is done with. It only ever ends in favour of a stub,
so it raises no false alarm."""
EPISODES = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """A policy against the baseline, over n paired episodes."""

    n: int
    policy: float
    baseline: float
    edge: float
    """Mean of the paired differences."""
    low: float
    """Lower end of the interval of the edge."""
    margin: float

    @property
    def wins(self) -> bool:
        return self.low > self.margin

    @property
    def ahead(self) -> bool:
        return self.edge > 0.0


def compare(policy: Sequence[float], baseline: Sequence[float], *, to_win: float, comparisons: int) -> Comparison:
    """Rewards of a policy against those of the baseline on the same tasks with the same seeds.

    Args:
        to_win: what the margin is a share of; at least 0.
        comparisons: how many policies this check compares.
    """
    differences = paired(policy, baseline)
    edge, spread = mean(differences) or 0.0, sd(differences)
    if spread is None:
        low = -math.inf
    else:
        low = edge - t_quantile(len(differences) - 1, 1.0 - ALPHA / comparisons) * spread / math.sqrt(len(differences))
    return Comparison(
        len(differences), mean(policy) or 0.0, mean(baseline) or 0.0, edge, low, MARGIN * max(to_win, 0.0)
    )
