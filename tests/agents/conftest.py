"""A gateway with the scripted engine, in this event loop and on a real socket, for real clients."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarmtune.testing import LocalServer, chatml_model

sys.path.insert(0, str(Path(__file__).parent))  # for agent_runs: test folders are no packages

from agent_runs import ScriptedModel, Stage

CONTEXT = 400_000
"""Tokens; one is a byte here, and command-line agents begin with 100 kB."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml", context=CONTEXT))


@pytest.fixture
async def stage(model_folder: str, tmp_path: Path) -> AsyncIterator[Stage]:
    model = ScriptedModel()
    async with LocalServer(tmp_path / "data", model_folder, script=model) as local:
        await local.boot(repeats=64, **{"engine.context_length": CONTEXT, "sampling.max_tokens": 4096})
        folder = tmp_path / "work"
        folder.mkdir()
        yield Stage(local, model, folder)
