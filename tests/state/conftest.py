from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmtune.episodes import EpisodeBook

# importmode=importlib puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
from state_parts import FakeClock, Swarm, build_swarm


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def book(clock: FakeClock) -> EpisodeBook:
    return EpisodeBook(clock, max_open=8)


@pytest.fixture
def swarm() -> Callable[..., Swarm]:
    return build_swarm


@pytest.fixture
def journal_path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"
