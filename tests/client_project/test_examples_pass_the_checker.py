"""The examples whose reward is easily got wrong pass the checker that they recommend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from a3r.client.check import Options, check_project

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("example", ["math", "judge_reward", "appworld"])
def test_an_example_passes(example: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / example, tmp_path / example))  # one keeps its judge's verdicts beside it
    report = check_project(folder, Options(limit_s=120.0, episodes=16))
    assert report.ok, report.as_dict()
