"""One real server process with the scripted engine for all examples, and a function that lets one train on it."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from swarmtune import SwarmClient
from swarmtune.local import LocalServer
from swarmtune.script import Script, main

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from example_runs import EXAMPLES, Train, Trained  # noqa: E402

_SEEDS = itertools.count(1)

for example in ("math", "judge_reward", "appworld", "cocktail", "werewolves", "academic_translation"):
    sys.path.append(str(EXAMPLES / example))  # as when a script in it is run; the modules have names of their own


@pytest.fixture(scope="session")
def example_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        with LocalServer(tmp_path_factory.mktemp("server"), fresh=True) as running:
            yield running


@pytest.fixture(scope="session")
def second_server(example_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """For the examples with two models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        with LocalServer(tmp_path_factory.mktemp("second-server"), fresh=True) as running:
            yield running


@pytest.fixture
def train(example_server: LocalServer, tmp_path: Path) -> Iterator[Train]:
    """`train(SCRIPT, "module:function", steps=1, …)`: the example's own command line, on the scripted engine."""
    runs = itertools.count(1)

    def run(script: Script, model: str, settings: Mapping[str, Any] | None = None) -> Trained:
        out = tmp_path / f"run-{next(runs)}"
        small = {
            "model": "tiny",
            "engine.kind": "scripted",
            "engine.script": model,
            "engine.context_length": 4096,
            "sampling.max_tokens": 512,
            "seed": next(_SEEDS),
            "steps": 1,
            "batch_tasks": 2,
            "repeats": 2,
            "parallel": 4,
            "checkpoint.every_steps": 0,
        }
        config = tmp_path / f"{out.name}.json"
        config.write_text(json.dumps(small | dict(settings or {})))
        with SwarmClient(example_server.url, patience_s=20.0) as swarm:
            before = max((event.seq for event in swarm.events_so_far()), default=0)
        status = main(script, ["--config", str(config), "--server", example_server.url, "--out", str(out)])
        with SwarmClient(example_server.url, patience_s=20.0) as swarm:
            events = swarm.events_so_far(after=before)
            swarm.stop()
        lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").is_file() else []
        return Trained(status, [json.loads(line) for line in lines], events, out)

    yield run
