"""Whole campaigns with the simulated client: a small pure leader, and everything else as shipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import campaigns


@pytest.fixture
def campaign(tmp_path: Path):
    """Makes campaigns in a temporary directory."""
    return campaigns.Maker(tmp_path)
