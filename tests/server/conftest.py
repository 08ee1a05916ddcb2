"""A swarm server in this event loop, on a real socket, with the scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtune.testing import LocalServer, chatml_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml"))


@pytest.fixture
async def local(model: str, tmp_path: Path):
    """Open, offline: `await local.boot(...)` wakes it."""
    async with LocalServer(tmp_path / "data", model) as local:
        yield local
