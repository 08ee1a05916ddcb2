"""The example of two models: its rules, and a whole run on two servers with the scripted engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "two_models" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_models_train", TRAIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "number"), [("7", 7), ("My number is 3.", 3), ("10", None), ("0", None), ("3 or 4", None), ("", None)]
)
def test_an_answer_names_one_number_or_none(example: ModuleType, answer: str, number: int | None) -> None:
    assert example.number_in(answer) == number


@pytest.mark.parametrize(
    ("mine", "theirs", "points"),
    [(7, 3, 1.0), (3, 7, 0.0), (5, 5, 0.5), (None, 5, 0.0), (1, None, 1.0), (None, None, 0.0)],
)
def test_the_higher_number_wins_and_none_loses(
    example: ModuleType, mine: int | None, theirs: int | None, points: float
) -> None:
    assert example.points_of(mine, theirs) == points


def test_both_models_train_against_each_other_and_leave_a_plot(tmp_path: Path) -> None:
    settings = {
        "engine.kind": "scripted",
        "engine.script": "duel_scripts:play",
        "batch_tasks": 2,
        "repeats": 2,
        "sampling.max_tokens": 64,
    }
    arguments = [f"--set={key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--model", "tiny", "--steps", "2", "--out", str(tmp_path), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted((line["role"], line["step"]) for line in lines) == [
        ("black", 1),
        ("black", 2),
        ("white", 1),
        ("white", 2),
    ]
    assert {line["episodes/trained"] for line in lines} == {4.0}
    points = {step: sum(line["reward/mean"] for line in lines if line["step"] == step) for step in (1, 2)}
    assert points == {1: pytest.approx(1.0), 2: pytest.approx(1.0)}, "each duel gives away one point"
    assert (tmp_path / "duel.png").stat().st_size > 1000
