"""Evaluation: k episodes per task that never enter the pool; mean, pass@k and confidence intervals.

What always holds: an evaluation belongs to one weight version, and its numbers are over the episodes that these weights
alone sampled; what failed, was mixed or was not run is counted and said.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, Literal

from swarmtune.client import AsyncSwarmClient
from swarmtune.errors import AccessDenied, ServerUnreachable, StartFailed, SwarmError, WeightsReplaced
from swarmtune.protocol import EvaluationOutcome, EvaluationRequest, Spread
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

    def spread(self) -> Spread:
        """For the wire, which has no infinities."""
        low, high = (x if math.isfinite(x) else None for x in (self.low, self.high))
        return Spread(value=self.value, low=low, high=high)


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """What became of one episode of an evaluation."""

    task_id: str
    repeat: int
    outcome: Literal["counted", "mixed", "failed", "skipped"]
    """mixed: the weights changed while it ran; skipped: they had been replaced before it began."""
    reward: float | None = None
    weight_versions: tuple[int, ...] = ()
    """Of the weights that sampled its tokens."""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The numbers of an evaluation: over the episodes sampled by the weights of `weight_version` alone."""

    mean: Estimate
    """Mean reward: t interval over the tasks' means; as wide as the line where there is one task."""
    pass_at: dict[int, Estimate]
    """For each k from 1 up to the episodes per task: chance that at least one of k is solved; Wilson interval."""
    rewards: dict[str, list[float]]
    """Task id → reward per episode."""
    failed: int
    """Episodes that raised; they are in no number above."""
    weight_version: int | None = None
    """Step whose weights were evaluated; None where the rewards come from elsewhere."""
    mixed: int = 0
    """Episodes during which the weights changed; they are in no number above."""
    skipped: int = 0
    """Episodes not begun because the weights had been replaced."""
    episodes: list[EpisodeReport] = field(default_factory=list)
    """Every one that was asked for, the first repeat of all tasks first."""

    @property
    def complete(self) -> bool:
        """Whether every episode that was asked for is in the numbers."""
        return not (self.failed or self.mixed or self.skipped)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the reports of single episodes; infinities become None."""
        data = asdict(self)
        del data["episodes"]
        for estimate in (data["mean"], *data["pass_at"].values()):
            estimate |= {k: None for k, v in estimate.items() if not math.isfinite(v)}
        return data

    def outcome(self) -> EvaluationOutcome:
        """What the server keeps of it."""
        return EvaluationOutcome(
            episodes=sum(map(len, self.rewards.values())),
            failed=self.failed,
            mixed=self.mixed,
            skipped=self.skipped,
            mean=self.mean.spread(),
            pass_at={k: estimate.spread() for k, estimate in self.pass_at.items()},
        )


async def evaluate(
    client: AsyncSwarmClient,
    tasks: Sequence[Any],
    rollout: Callable[..., Any],
    *,
    k: int,
    name: str,
    version: int | None,
    sampling: Mapping[str, Any],
    hold_sync_s: float | None,
    parallel: int,
    seed: int,
    success: float,
    episode_timeout_s: float | None,
) -> Evaluation:
    """See AsyncSwarmClient.evaluate."""
    if not tasks or k < 1:
        raise ValueError("evaluate: at least one task and one episode per task")
    ids = [task_id_of(task) for task in tasks]
    if len(set(ids)) != len(ids):
        raise ValueError("tasks: two have the same task_id")
    begun = await client.begin_evaluation(
        EvaluationRequest(
            evaluation_id=uuid.uuid4().hex,
            name=name,
            weight_version=version,
            tasks=len(ids),
            k=k,
            sampling=dict(sampling),
            hold_sync_s=hold_sync_s,
        )
    )
    gate = asyncio.Semaphore(parallel)

    async def one(task: Any, task_id: str, repeat: int) -> EpisodeReport:
        async with gate:
            options: dict[str, Any] = {
                "kind": "evaluate",
                "sampling": sampling,
                "seed": episode_seed(seed, "evaluate", task_id, repeat),
                "evaluation_id": begun.evaluation_id,
            }
            try:
                async with client.episode(task_id, **options) as episode:
                    outcome = await play(rollout, task, episode, timeout_s=episode_timeout_s)
                    if outcome is None:
                        raise RuntimeError("an evaluated rollout returns its reward instead of ending its episode")
                    versions = tuple((await episode.end(outcome.reward, outcome.metrics)).weight_versions)
                    pure = set(versions) <= {begun.weight_version}
                    reward = float(outcome.reward)
                    return EpisodeReport(task_id, repeat, "counted" if pure else "mixed", reward, versions)
            except _FATAL:
                raise
            except WeightsReplaced as error:
                return EpisodeReport(task_id, repeat, "skipped", error=error)
            except Exception as error:  # noqa: BLE001 - one bad episode must not end the others; it is counted
                log.warning("evaluation episode failed: %r", error)
                return EpisodeReport(task_id, repeat, "failed", error=error)

    # The first repeat of every task first: what is cut off by new weights is then spread over all tasks.
    running = [asyncio.create_task(one(t, i, r)) for r in range(k) for t, i in zip(tasks, ids, strict=True)]
    try:
        reports = await asyncio.gather(*running)
    finally:
        for episode in running:
            episode.cancel()
    return await _conclude(client, begun.evaluation_id, begun.weight_version, ids, reports, k=k, success=success)


async def _conclude(
    client: AsyncSwarmClient,
    evaluation_id: str,
    version: int,
    ids: Sequence[str],
    reports: Sequence[EpisodeReport],
    *,
    k: int,
    success: float,
) -> Evaluation:
    """The numbers, and the server told of them.

    Raises:
        RuntimeError: there is nothing to make numbers of.
    """
    count = Counter(report.outcome for report in reports)
    failed, mixed, skipped = count["failed"], count["mixed"], count["skipped"]
    if not count["counted"]:
        nothing = EvaluationOutcome(episodes=0, failed=failed, mixed=mixed, skipped=skipped)
        await _tell(client, evaluation_id, nothing)
        last = next((r.error for r in reversed(reports) if r.outcome == "failed"), None)
        if last is not None:
            raise RuntimeError(f"all {failed} evaluation episodes failed, the last with {last!r}") from last
        raise RuntimeError(
            f"no episode ran under the weights of step {version} alone ({mixed} mixed, {skipped} not begun): the "
            "training went on; allow a longer hold_sync_s"
        )
    rewards: dict[str, list[float]] = {task_id: [] for task_id in ids}
    for report in reports:
        if report.outcome == "counted" and report.reward is not None:
            rewards[report.task_id].append(report.reward)
    done = summarize(
        rewards,
        k=k,
        success=success,
        failed=failed,
        weight_version=version,
        mixed=mixed,
        skipped=skipped,
        episodes=list(reports),
    )
    await _tell(client, evaluation_id, done.outcome())
    if done.mixed or done.skipped:
        log.warning(
            "the weights moved on during the evaluation of step %d: %d episodes mixed, %d not begun; neither counts",
            version,
            done.mixed,
            done.skipped,
        )
    return done


async def _tell(client: AsyncSwarmClient, evaluation_id: str, outcome: EvaluationOutcome) -> None:
    """Put the numbers into the server's table; that they could not be is no reason to lose them here."""
    try:
        await client.finish_evaluation(evaluation_id, outcome)
    except SwarmError as error:
        log.warning("the evaluation is not in the server's table: %s", error)


def summarize(
    rewards: Mapping[str, Sequence[float]], *, k: int, success: float, failed: int = 0, **facts: Any
) -> Evaluation:
    """The numbers of an evaluation from its rewards; tasks without any are left out. `facts`: of Evaluation."""
    tried = {task: list(r) for task, r in rewards.items() if r}
    most = min(k, *(len(r) for r in tried.values()))
    pass_at = {}
    for n in range(1, most + 1):
        chances = [chance_of_one(len(r), sum(x >= success for x in r), n) for r in tried.values()]
        pass_at[n] = wilson_interval(fmean(chances), len(chances))
    return Evaluation(t_interval([fmean(r) for r in tried.values()]), pass_at, tried, failed, **facts)


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
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))
