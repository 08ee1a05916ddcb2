"""The example: four clients ask the same question, and what would train is the same token for token."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from agent_runs import ROOT, Stage

from swarmtune import AsyncSwarmClient

EXAMPLE = ROOT / "examples" / "four_frameworks"

pytestmark = pytest.mark.filterwarnings("ignore")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"four_frameworks_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_four_clients_give_equal_samples_token_for_token(stage: Stage):
    for package in ("langchain_openai", "agentscope"):
        pytest.importorskip(package, reason="extra frameworks is not installed")
    example = load("train")
    stage.model.play(" Das wären … 7!\n\n", tools=False)
    run = stage.local.server.live_run()
    rows, episodes = {}, []
    async with AsyncSwarmClient(stage.local.url) as swarm:
        for via in example.ASK:
            episode = await swarm.claim("add-3-4", seed=5)
            assert await example.rollout({"a": 3, "b": 4, "via": via}, episode) == 1.0
            samples = run.merge(run.book.by_key(episode.api_key)).samples
            rows[via] = [replace(sample, sample_id="", episode_id="", call_ids=[]) for sample in samples]
            (turn,) = run.merge_report(run.book.by_key(episode.api_key))["turns"]
            assert turn["asked"] == {}, f"{via} asks for sampling of its own"
            episodes.append(episode)
        for episode in episodes:  # not earlier: a step would change the weight version
            assert (await episode.end(1.0)).outcome == "admitted"
    assert len(rows) == 4 and all(found == rows["openai"] for found in rows.values())
    assert sum(rows["openai"][0].loss_mask) == len(" Das wären … 7!\n\n".encode()) + 1, "one token a byte, and the end"


@pytest.mark.slow
def test_one_command_trains_all_four_and_draws_their_curves(tmp_path: Path, model_folder: str):
    for package in ("langchain_openai", "agentscope"):
        pytest.importorskip(package, reason="extra frameworks is not installed")
    small = {
        "model": model_folder,
        "engine.kind": "scripted",
        "steps": 1,
        "batch_tasks": 2,
        "repeats": 2,
        "parallel": 4,
    }
    (tmp_path / "small.json").write_text(json.dumps(small))
    command = [sys.executable, str(EXAMPLE / "compare.py"), "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "core")}
    done = subprocess.run(
        [*command, "--config", str(tmp_path / "small.json")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    curves = [line.split()[-1] for line in done.stdout.splitlines()[:4]]
    assert len(set(curves)) == 1, done.stdout
    assert (tmp_path / "out" / "rewards.png").stat().st_size > 10_000
