"""A training that goes on, with a client that knows nothing of the one before, takes the tasks in the same order."""

from __future__ import annotations

import httpx
import pytest

from swarmtune import AsyncSwarmClient
from swarmtune.testing import LocalServer


@pytest.mark.parametrize("tasks", [5, 3])
async def test_tasks_and_seeds_after_a_resume_are_those_of_a_run_without_one(tmp_path, model, tasks):
    names = [f"t{n}" for n in range(tasks)]

    async def play(data, stops: list[int]) -> list[tuple[int, str, int | None]]:
        played: list[tuple[int, str, int | None]] = []

        async def rollout(task: str, episode) -> float:
            body = {"model": "swarm", "messages": [{"role": "user", "content": task}]}
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            async with httpx.AsyncClient(headers=headers, timeout=60, verify=False) as http:
                (await http.post(f"{episode.base_url}/chat/completions", json=body)).raise_for_status()
            played.append((episode.grant.step, task, episode.seed))
            return float(len(played) % 2)

        for steps in stops:
            async with LocalServer(data, model) as local, AsyncSwarmClient(local.url, patience_s=60) as swarm:
                await swarm.start(local.config(batch_tasks=2, repeats=2, seed=3))
                await swarm.train(names, rollout, steps=steps, parallel=4)
        return sorted(played)

    straight = await play(tmp_path / "straight", [4])
    assert len(straight) == 16
    assert await play(tmp_path / "resumed", [1, 3, 4]) == straight
