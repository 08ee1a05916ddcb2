"""A clock that only moves when told, builders of small values, and the parts wired as a server wires them."""

from __future__ import annotations

from dataclasses import dataclass

from swarmtune.clients import ClientRegistry
from swarmtune.config import BatchingConfig
from swarmtune.episodes import Episode, EpisodeBook
from swarmtune.pool import Admitted, SamplePool
from swarmtune.protocol import EndResult
from swarmtune.types import FinishedEpisode, Sample


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Swarm:
    """Book, registry and pool as a server wires them, with one step's worth of verbs."""

    clock: FakeClock
    config: BatchingConfig
    batch_tasks: int
    repeats: int
    book: EpisodeBook
    clients: ClientRegistry
    pool: SamplePool
    weight_version: int = 0
    submissions: int = 0

    def claim(self, task_id: str, client: str | None = None) -> Episode:
        return self.book.claim(
            task_id, lease_s=600.0, client=client, weight_version=self.weight_version, step=self.weight_version + 1
        )

    def end(self, episode: Episode, reward: float = 0.0) -> Admitted:
        self.submissions += 1
        self.book.end(episode.episode_id, f"sub-{self.submissions}", reward, end_result(episode.episode_id))
        admitted = self.pool.admit(finished_of(episode, reward), weight_version=self.weight_version)
        assert isinstance(admitted, Admitted)
        return admitted

    def run(self, task_id: str, reward: float = 0.0, client: str | None = None) -> str:
        episode = self.claim(task_id, client)
        self.end(episode, reward)
        return episode.episode_id

    def run_task(self, task_id: str, rewards: list[float], client: str | None = None) -> list[str]:
        return [self.run(task_id, reward, client) for reward in rewards]

    def step(self) -> list[str]:
        """Take the batch of the next step, move the weights on; the ids in the batch's order."""
        batch = self.pool.take_batch(self.weight_version + 1)
        self.weight_version += 1
        self.pool.advance(self.weight_version)
        return [e.episode_id for e in batch.episodes]

    @property
    def ready(self) -> bool:
        return self.pool.ready(self.weight_version + 1)

    def may_claim(self, task_id: str, client: str | None = None) -> bool:
        return self.pool.may_claim(task_id, client) is None


def sample_of(episode_id: str, task_id: str, tokens: int = 3) -> Sample:
    return Sample(
        sample_id=f"{episode_id}/0",
        episode_id=episode_id,
        task_id=task_id,
        token_ids=list(range(tokens)),
        loss_mask=[0] + [1] * (tokens - 1),
        logprobs=[0.0] + [-0.5] * (tokens - 1),
        weight_versions=[-1] + [0] * (tokens - 1),
    )


def finished_of(episode: Episode, reward: float) -> FinishedEpisode:
    return FinishedEpisode(
        episode_id=episode.episode_id,
        task_id=episode.task_id,
        reward=reward,
        samples=[sample_of(episode.episode_id, episode.task_id)],
        client=episode.client,
        weight_version=episode.weight_version,
    )


def end_result(episode_id: str, tokens: int = 2) -> EndResult:
    return EndResult(episode_id=episode_id, outcome="admitted", samples=1, sampled_tokens=tokens)


def build_swarm(
    policy: str = "task_count", *, batch_tasks: int = 2, repeats: int = 2, max_open: int = 512, **batching: object
) -> Swarm:
    clock = FakeClock()
    config = BatchingConfig.model_validate({"policy": policy, **batching})
    book = EpisodeBook(clock, max_open=max_open)
    clients = ClientRegistry(config, batch_tasks, clock)
    pool = SamplePool(config, batch_tasks=batch_tasks, repeats=repeats, clients=clients, book=book, clock=clock)
    return Swarm(clock, config, batch_tasks, repeats, book, clients, pool)
