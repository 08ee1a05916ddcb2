"""A real server process with the scripted engine, its clients, and a proxy that loses answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtune import SwarmClient
from swarmtune.local import LocalServer
from tests.client.client_parts import LosingProxy, RestartableServer

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One server for all tests of this folder; each starts a training of its own in it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before]))
    try:
        with LocalServer(tmp_path_factory.mktemp("server"), fresh=True) as running:
            yield running
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def swarm(server: LocalServer) -> Iterator[SwarmClient]:
    """A client of the server; the training it started is stopped afterwards."""
    with SwarmClient(server.url, patience_s=20.0) as client:
        yield client
        client.stop()


@pytest.fixture
def proxy(server: LocalServer) -> Iterator[LosingProxy]:
    with LosingProxy(server.url) as running:
        yield running


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[RestartableServer]:
    server = RestartableServer(tmp_path / "data")
    server.start()
    yield server
    server.kill()
