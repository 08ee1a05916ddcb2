"""Two real server processes with the scripted engine, and a swarm of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtune import Swarm, SwarmClient
from swarmtune.local import LocalServer
from tests.client.client_parts import RestartableServer

SCRIPTS = Path(__file__).parents[1] / "client"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, LocalServer]]:
    """Two servers for all tests of this folder; each test starts trainings of its own in them."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPTS), before]))
    try:
        with (
            LocalServer(tmp_path_factory.mktemp("white"), fresh=True) as white,
            LocalServer(tmp_path_factory.mktemp("black"), fresh=True) as black,
        ):
            yield white, black
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def swarm(pair: tuple[LocalServer, LocalServer]) -> Iterator[Swarm]:
    """White and black; the trainings started through it are stopped afterwards."""
    white, black = pair
    with Swarm(
        {"white": SwarmClient(white.url, patience_s=20), "black": SwarmClient(black.url, patience_s=20)}
    ) as both:
        yield both
        both.stop()


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[tuple[RestartableServer, RestartableServer]]:
    """Two servers that answer, and may be killed and started again."""
    white, black = RestartableServer(tmp_path / "white"), RestartableServer(tmp_path / "black")
    white.start()
    black.start()
    for server in (white, black):
        with SwarmClient(server.url, patience_s=60) as client:
            client.status()
    yield white, black
    white.kill()
    black.kill()
