"""A rank killed in the middle of a step costs that step's work, not the server and not an episode.

No process of Ray outlives its engine process, whether that ended itself or was killed; `test_ray_trainer` looks after a
stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from ray_processes import PATIENCE_S, alive, descendants, engine_log, ranks_of

from swarmtune import models
from swarmtune.backend import Backend
from swarmtune.config import TrainConfig
from swarmtune.engines.process import ProcessBackend
from swarmtune.protocol import EngineState
from swarmtune.server import SwarmServer
from swarmtune.testing import LocalServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class RealServer(LocalServer):
    """LocalServer with the real engine process."""

    def __init__(self, data_dir: Path, model: str) -> None:
        super().__init__(data_dir, model)
        self.data_dir = data_dir
        self.made: list[ProcessBackend] = []
        self.server = SwarmServer(data_dir, backends={"hf": self._make_real})

    def _make_real(self) -> Backend:
        self.made.append(ProcessBackend())
        return self.made[-1]

    @property
    def engine_pid(self) -> int:
        pid = self.made[-1].pid
        assert pid is not None
        return pid

    def says(self, state: EngineState) -> Callable[[], bool]:
        def holds() -> bool:
            status = self.server.status()
            assert status.state != EngineState.FAILED, f"{status}\n{engine_log(self.data_dir)}"
            return status.state == state

        return holds


def config(model: str) -> dict:
    keys = {
        "model": model,
        "batch_tasks": 2,
        "repeats": 2,
        "trainer.dtype": "fp32",
        "sampling.max_tokens": 12,
        "engine.context_length": 256,
        "engine.threads": 2,
        "ray.processes": 2,
        "checkpoint.every_steps": 1,
        "batching.drain_s": 0.0,
        "optim.lr": 1e-4,
    }
    return TrainConfig.from_dict(keys).model_dump(mode="json")


async def fill_a_batch(local: RealServer) -> list[str]:
    """Episode ids of the 2 × 2 episodes of one step."""
    ids = []
    for task in ("a", "b"):
        for repeat in range(2):
            grant = await local.claim(task)
            await local.chat(grant.api_key, f"{task}?")
            await local.end(grant.episode_id, reward=float(repeat))
            ids.append(grant.episode_id)
    return ids


def step_of_episodes(data_dir: Path) -> dict[str, int]:
    """Episode id → the step that trained it, by the journal: an episode has one."""
    (journal,) = data_dir.rglob("journal.db")
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
        found = db.execute(
            "SELECT id, batch_step FROM episodes JOIN batches ON batches.step = batch_step "
            "WHERE batches.state = 'trained'"
        )
        return dict(found.fetchall())


async def test_a_rank_killed_in_the_middle_of_a_step_costs_no_episode(tmp_path: Path):
    model = str(models.resolve("tiny"))
    async with RealServer(tmp_path / "data", model) as local:
        await local.server.start(config(model))
        await local.until(local.says(EngineState.ROLLING), PATIENCE_S)
        accepted = await fill_a_batch(local)
        await local.until(lambda: local.server.status().step == 1, PATIENCE_S)
        await local.until(local.says(EngineState.ROLLING), PATIENCE_S)

        first_engine = local.engine_pid
        of_first = descendants(first_engine)
        ranks = ranks_of(first_engine)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)  # the step that begins now cannot end
        accepted += await fill_a_batch(local)
        await local.until(local.says(EngineState.WEIGHT_SYNCING), PATIENCE_S)
        os.kill(ranks[1], signal.SIGKILL)

        await local.until(lambda: local.server.status().step == 2, PATIENCE_S)
        assert local.engine_pid != first_engine
        assert "a rank of the trainer failed" in engine_log(tmp_path / "data")
        await local.until(lambda: not alive(of_first), PATIENCE_S)
        await local.until(local.says(EngineState.ROLLING), PATIENCE_S)

        accepted += await fill_a_batch(local)
        await local.until(lambda: local.server.status().step == 3, PATIENCE_S)
        assert local.server.status().weight_version == 3
        steps = step_of_episodes(tmp_path / "data")
        assert sorted(steps) == sorted(accepted)
        assert Counter(steps.values()) == {1: 4, 2: 4, 3: 4}
        records = await local.server.steps_after(0, wait_s=0)
        assert [(r.step, r.metrics["episodes/trained"]) for r in records] == [(1, 4), (2, 4), (3, 4)]

        of_second = descendants(local.engine_pid)
        assert len(ranks_of(local.engine_pid)) == 2
        os.kill(local.engine_pid, signal.SIGKILL)
        await local.until(lambda: not alive(of_second), PATIENCE_S)
        last = local.engine_pid
    assert not alive(of_second)
    assert not descendants(last)
