"""Evaluation: k episodes per task that never enter the pool; mean, pass@k and confidence intervals."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from swarmtune.client import AsyncSwarmClient
from swarmtune.errors import AccessDenied, ServerUnreachable, StartFailed
from swarmtune.rollout import episode_seed, play, task_id_of

log = logging.getLogger(__name__)

CONFIDENCE = 0.95
_Z = 1.959964
_FATAL = (AccessDenied, ServerUnreachable, StartFailed)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % confidence interval over tasks."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    mean: Estimate
    """Mean reward: t interval over the tasks' means; as wide as the line where there is one task."""
    pass_at: dict[int, Estimate]
    """For each k from 1 up to the episodes per task: chance that at least one of k is solved; Wilson interval."""
    rewards: dict[str, list[float]]
    """Task id → reward per episode."""
    failed: int
    """Episodes that raised; they are in no number above."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; infinities become None."""
        data = asdict(self)
        for estimate in (data["mean"], *data["pass_at"].values()):
            estimate |= {k: None for k, v in estimate.items() if not math.isfinite(v)}
        return data


async def evaluate(
    client: AsyncSwarmClient,
    tasks: Sequence[Any],
    rollout: Callable[..., Any],
    *,
    k: int,
    sampling: Mapping[str, Any] | None,
    parallel: int,
    seed: int,
    success: float,
    episode_timeout_s: float | None,
) -> Evaluation:
    """See AsyncSwarmClient.evaluate.

    Raises:
        RuntimeError: every episode failed; the last error is chained.
    """
    if not tasks or k < 1:
        raise ValueError("evaluate: at least one task and one episode per task")
    ids = [task_id_of(task) for task in tasks]
    if len(set(ids)) != len(ids):
        raise ValueError("tasks: two have the same task_id")
    gate = asyncio.Semaphore(parallel)

    async def one(task: Any, task_id: str, repeat: int) -> float:
        async with gate:
            options = {
                "kind": "evaluate",
                "sampling": sampling,
                "seed": episode_seed(seed, "evaluate", task_id, repeat),
            }
            async with client.episode(task_id, **options) as episode:
                outcome = await play(rollout, task, episode, timeout_s=episode_timeout_s)
                if outcome is None:
                    raise RuntimeError("an evaluated rollout returns its reward instead of ending its episode")
                await episode.end(outcome.reward, outcome.metrics)
                return float(outcome.reward)

    running = [[asyncio.create_task(one(t, i, r)) for r in range(k)] for t, i in zip(tasks, ids, strict=True)]
    everything = [episode for group in running for episode in group]
    try:
        results = await asyncio.gather(*everything, return_exceptions=True)
    finally:
        for episode in everything:
            episode.cancel()
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in errors:
        if isinstance(error, _FATAL) or not isinstance(error, Exception):
            raise error
        log.warning("evaluation episode failed: %r", error)
    if len(errors) == len(results):
        raise RuntimeError(f"all {len(errors)} evaluation episodes failed, the last with {errors[-1]!r}") from errors[
            -1
        ]
    rewards = {
        task_id: [e.result() for e in group if not e.exception()] for task_id, group in zip(ids, running, strict=True)
    }
    return summarize(rewards, k=k, success=success, failed=len(errors))


def summarize(rewards: Mapping[str, Sequence[float]], *, k: int, success: float, failed: int = 0) -> Evaluation:
    """The numbers of an evaluation from its rewards; tasks without any are left out."""
    tried = {task: list(r) for task, r in rewards.items() if r}
    most = min(k, *(len(r) for r in tried.values()))
    pass_at = {}
    for n in range(1, most + 1):
        chances = [chance_of_one(len(r), sum(x >= success for x in r), n) for r in tried.values()]
        pass_at[n] = wilson_interval(fmean(chances), len(chances))
    return Evaluation(t_interval([fmean(r) for r in tried.values()]), pass_at, tried, failed)


def chance_of_one(n: int, solved: int, k: int) -> float:
    """Unbiased estimate of pass@k from `solved` of `n` episodes: 1 - C(n - solved, k) / C(n, k)."""
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def t_interval(values: Sequence[float]) -> Estimate:
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, -math.inf, math.inf)
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def wilson_interval(share: float, n: int) -> Estimate:
    """For a share of n in [0, 1]; stays inside it and is not empty at 0 and 1."""
    scale = 1 + _Z**2 / n
    centre = (share + _Z**2 / (2 * n)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))
