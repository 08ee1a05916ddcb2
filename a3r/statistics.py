"""The statistics a study uses, as functions of plain lists; `FUNCTIONS` are those a report's numbers may name.

The unit is the seed: one value per run. Intervals across seeds are t intervals (a percentile bootstrap of 3 to 10 seeds
covers 75 to 89 % where it promises 95). Two-group contrasts take Welch's degrees of freedom. Everything is two-sided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from scipy.special import stdtr, stdtrit

SPENDING = 1.5
"""0 shares alpha equally, 1 in proportion. Chosen by benchmarks/planner_accuracy.py: with a reference arm, a noise of
0.3 of the gap and a tenth of the runs lost, 1 is right in 0.945 of 200 studies and 1.5 in 0.965, wrong in none."""

Values = Sequence[float]
Params = Mapping[str, float]


def mean(x: Values) -> float | None:
    return math.fsum(x) / len(x) if x else None


def sd(x: Values) -> float | None:
    """Sample standard deviation (n - 1); None below two values."""
    if len(x) < 2:
        return None
    centre = math.fsum(x) / len(x)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in x) / (len(x) - 1))


def median(x: Values) -> float | None:
    if not x:
        return None
    ordered = sorted(x)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def t_quantile(df: float, p: float) -> float:
    return float(stdtrit(df, p))


def contrast(x: Values, y: Values, params: Params) -> tuple[float, float, float] | None:
    """`a·mean(x) + b·mean(y) + shift` as (estimate, standard error, degrees of freedom).

    `floor` in params is the least standard deviation to assume for a group: identical values of three seeds prove no
    absence of noise. None when a group that counts has fewer than two values.
    """
    a, b, shift, floor = params.get("a", 1.0), params.get("b", 0.0), params.get("shift", 0.0), params.get("floor", 0.0)
    estimate, parts = shift, []
    for weight, group in ((a, x), (b, y)):
        if weight == 0.0:
            continue
        spread = sd(group)
        if spread is None:
            return None
        estimate += weight * math.fsum(group) / len(group)
        parts.append((weight**2 * max(spread, floor) ** 2 / len(group), len(group) - 1))
    variance = math.fsum(v for v, _ in parts)
    if variance == 0.0:
        return estimate, 0.0, float(sum(df for _, df in parts))
    df = variance**2 / math.fsum(v**2 / d for v, d in parts)
    return estimate, math.sqrt(variance), df


def bound(x: Values, y: Values, params: Params, side: int) -> float | None:
    """End of the two-sided 1 - alpha interval of a contrast; side is -1 or 1."""
    found = contrast(x, y, params)
    if found is None:
        return None
    estimate, error, df = found
    return estimate + side * error * t_quantile(df, 1.0 - params["alpha"] / 2.0) if error else estimate


def p_value(x: Values, y: Values, params: Params) -> float | None:
    """Two-sided p of a contrast being zero."""
    found = contrast(x, y, params)
    if found is None:
        return None
    estimate, error, df = found
    if error == 0.0:
        return 1.0 if estimate == 0.0 else 0.0
    return 2.0 * float(stdtr(df, -abs(estimate) / error))


def paired(x: Values, y: Values) -> list[float]:
    """x - y by position; both in the order of their seeds."""
    return [a - b for a, b in zip(x, y, strict=True)]


def interactions(x: Values, y: Values, params: Params) -> list[float]:
    """Per seed (high-high - low-high) - (high-low - low-low); x = [hh…, ll…], y = [lh…, hl…], `k` seeds each."""
    k = int(params["k"])
    return [x[i] - y[i] - (y[k + i] - x[k + i]) for i in range(k)]


def wilson(x: Values, side: int, alpha: float) -> float | None:
    """End of the Wilson interval of a rate; x are zeros and ones."""
    if not x:
        return None
    n, rate = len(x), math.fsum(x) / len(x)
    z = t_quantile(1e9, 1.0 - alpha / 2.0)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return min(1.0, max(0.0, centre + side * half))


def pooled_sd(groups: Sequence[Values]) -> float | None:
    """Standard deviation within groups; None without a group of two."""
    usable = [g for g in groups if len(g) >= 2]
    df = sum(len(g) - 1 for g in usable)
    if not df:
        return None
    return math.sqrt(math.fsum((sd(g) or 0.0) ** 2 * (len(g) - 1) for g in usable) / df)


def _split(x: Values, params: Params) -> list[list[float]]:
    """Consecutive groups whose sizes are the params g0, g1, …"""
    out, at = [], 0
    i = 0
    while f"g{i}" in params:
        size = int(params[f"g{i}"])
        out.append(list(x[at : at + size]))
        at += size
        i += 1
    return out


def _one(params: Params) -> Params:
    return {**params, "a": 1.0, "b": 0.0, "shift": 0.0}


Function = Callable[[Values, Values, Params], float | None]

FUNCTIONS: dict[str, Function] = {
    "value": lambda x, _, __: x[0] if x else None,
    "sum": lambda x, _, __: math.fsum(x),
    "n": lambda x, _, __: float(len(x)),
    "mean": lambda x, _, __: mean(x),
    "sd": lambda x, _, __: sd(x),
    "median": lambda x, _, __: median(x),
    "ci_low": lambda x, y, p: bound(x, y, _one(p), -1),
    "ci_high": lambda x, y, p: bound(x, y, _one(p), 1),
    "diff": lambda x, y, p: (c := contrast(x, y, p)) and c[0],
    "diff_low": lambda x, y, p: bound(x, y, p, -1),
    "diff_high": lambda x, y, p: bound(x, y, p, 1),
    "diff_p": p_value,
    "paired": lambda x, y, _: mean(paired(x, y)),
    "paired_low": lambda x, y, p: bound(paired(x, y), (), _one(p), -1),
    "paired_high": lambda x, y, p: bound(paired(x, y), (), _one(p), 1),
    "paired_p": lambda x, y, p: p_value(paired(x, y), (), _one(p)),
    "interaction": lambda x, y, p: mean(interactions(x, y, p)),
    "interaction_low": lambda x, y, p: bound(interactions(x, y, p), (), _one(p), -1),
    "interaction_high": lambda x, y, p: bound(interactions(x, y, p), (), _one(p), 1),
    "interaction_p": lambda x, y, p: p_value(interactions(x, y, p), (), _one(p)),
    "pooled_sd": lambda x, _, p: pooled_sd(_split(x, p)),
    "rate": lambda x, _, __: mean(x),
    "rate_low": lambda x, _, p: wilson(x, -1, p["alpha"]),
    "rate_high": lambda x, _, p: wilson(x, 1, p["alpha"]),
}


def seeds_needed(noise: float, margin: float, alpha: float, power: float = 0.8, most: int = 1000) -> int:
    """Seeds per arm that tell a mean `margin` away from the bar at `alpha` (two-sided) with `power`."""
    if noise <= 0.0:
        return 2
    if margin <= 0.0:
        return most
    for n in range(2, most):
        if (t_quantile(n - 1, 1 - alpha / 2) + t_quantile(n - 1, power)) * noise / math.sqrt(n) <= margin:
            return n
    return most


def margin_reached(noise: float, n: int, alpha: float, power: float = 0.8) -> float:
    """The distance from the bar that n seeds can tell."""
    if n < 2:
        return math.inf
    return (t_quantile(n - 1, 1 - alpha / 2) + t_quantile(n - 1, power)) * noise / math.sqrt(n)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to the values (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            v2, w2, n2 = blocks.pop()
            v1, w1, n1 = blocks.pop()
            blocks.append([(v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2])
    return [block[0] for block in blocks for _ in range(int(block[2]))]


def look_alphas(looks: Sequence[int], alpha: float) -> list[float]:
    """The error each look may spend: alpha in proportion to its seeds to the power SPENDING.

    The parts add up to alpha, so stopping at any look stays within it; early looks, where few seeds decide, get little.
    """
    weights = [look**SPENDING for look in looks]
    return [alpha * weight / sum(weights) for weight in weights]
