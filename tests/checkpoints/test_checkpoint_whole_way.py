"""A real training in a server process: exported while it runs, evaluated, and taken back to an earlier step."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from swarmtune import SwarmClient, TrainConfig
from swarmtune.client import Episode
from swarmtune.local import LocalServer
from swarmtune.trainer.export import ORIGIN, export

pytestmark = pytest.mark.slow


def rollout(task: str, episode: Episode) -> float:
    body = {"model": "swarm", "messages": [{"role": "user", "content": task}]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    answer = httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return (episode.seed or 0) % 7 / 7


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ORIGIN}


def test_a_real_training_is_exported_evaluated_and_taken_back_to_a_step(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {
            "model": "tiny",
            "batch_tasks": 2,
            "repeats": 2,
            "engine.context_length": 256,
            "engine.threads": 1,
            "sampling.max_tokens": 8,
            "trainer.dtype": "fp32",
            "optim.lr": 1e-3,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_last": 9,
        }
    )
    with (
        LocalServer(tmp_path / "data", fresh=True) as server,
        SwarmClient(server.url, patience_s=120) as swarm,
    ):
        swarm.start(config)
        swarm.train(["a", "b", "c"], rollout, steps=2, parallel=1)
        assert swarm.export(tmp_path / "now").step == 2
        done = swarm.evaluate(["a", "b"], rollout, k=2, temperature=0, name="test", parallel=2)
        assert (done.weight_version, done.complete) == (2, True)
        assert [v.step for v in swarm.checkpoints()] == [1, 2]
        swarm.stop()
        assert swarm.start(config, from_step=1).step == 1
        assert swarm.export(tmp_path / "back", step=1, dtype="fp32").step == 1
        swarm.train(["a", "b", "c"], rollout, steps=2, parallel=1)
        assert swarm.export(tmp_path / "again").step == 2
    first = tmp_path / "data" / "runs" / "0001" / "checkpoints"
    for step, name in ((2, "now"), (1, "back")):
        export(first / f"step-{step:06d}", tmp_path / f"{name}-offline")
        assert files(tmp_path / name) == files(tmp_path / f"{name}-offline")
    assert files(tmp_path / "back") != files(tmp_path / "now")
    # The same tasks in the same order, seeds, weights, optimizer and random state: it is the same step again.
    assert files(tmp_path / "again") == files(tmp_path / "now")
