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

from swarmtune import SwarmClient, swarm_script
from swarmtune.local import LocalServer
from swarmtune.script import Script, main
from swarmtune.swarm_script import SwarmScript

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from example_runs import EXAMPLES, Train, Trained, TrainedRoles, TrainRoles  # noqa: E402

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
        config = small_config(out, model, settings)
        with SwarmClient(example_server.url, patience_s=20.0) as swarm:
            before = max((event.seq for event in swarm.events_so_far()), default=0)
        status = main(script, ["--config", str(config), "--server", example_server.url, "--out", str(out)])
        with SwarmClient(example_server.url, patience_s=20.0) as swarm:
            events = swarm.events_so_far(after=before)
            swarm.stop()
        return Trained(status, steps_in(out), events, out)

    yield run


@pytest.fixture
def train_roles(example_server: LocalServer, second_server: LocalServer, tmp_path: Path) -> TrainRoles:
    def run(script: SwarmScript, model: str, roles: list[str], settings: Mapping[str, Any]) -> TrainedRoles:
        out = tmp_path / "roles"
        arguments = ["--config", str(small_config(out, model, settings)), "--out", str(out)]
        for role, server in zip(roles, (example_server, second_server), strict=True):
            arguments += ["--server", f"{role}={server.url}"]
        status = swarm_script.main(script, arguments)
        for server in (example_server, second_server):
            with SwarmClient(server.url, patience_s=20.0) as swarm:
                swarm.stop()
        return TrainedRoles(status, {role: steps_in(out / role) for role in roles}, out)

    return run


def small_config(out: Path, model: str, settings: Mapping[str, Any] | None) -> Path:
    """A configuration file beside `out`: one small step on the scripted engine."""
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
    config = out.with_name(f"{out.name}.json")
    config.write_text(json.dumps(small | dict(settings or {})))
    return config


def steps_in(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
