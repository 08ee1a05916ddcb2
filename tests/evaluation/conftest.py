"""A model folder for scripted servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtune.testing import chatml_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chatml_model(tmp_path_factory.mktemp("model") / "chatml"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"
