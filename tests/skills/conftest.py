"""Commands on PATH and one server with the scripted engine, for the code of all skills."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtune import SwarmClient

sys.path.insert(0, str(Path(__file__).parent))  # for skill_stage: test folders are no packages

from skill_stage import CONFIG, environment, make_commands, served


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_commands(tmp_path_factory.mktemp("commands") / "bin")


@pytest.fixture(scope="session")
def url(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A rolling server."""
    with served(commands, tmp_path_factory.mktemp("server") / "data") as found:
        with SwarmClient(found) as swarm:
            swarm.start(CONFIG)
        yield found


@pytest.fixture
def variables(commands: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a person at a terminal, without a server."""
    return environment(commands, "http://127.0.0.1:9", tmp_path / "home")


@pytest.fixture
def in_terminal(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has those variables, for what starts programs itself."""
    for name in ("PATH", "PYTHONPATH", "HOME", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "SWARMTUNE_URL"):
        monkeypatch.setenv(name, variables[name])
