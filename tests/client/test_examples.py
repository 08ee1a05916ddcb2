"""The examples: their rewards cannot be won cheaply, and the cocktail goes on while one of its clients is dead."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.client.client_parts import HERE

ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7", 1.0),
        ("3 + 4 = 7", 1.0),
        ("The answer is 7.", 1.0),
        ("7 or 8", 0.0),
        ("1 2 3 4 5 6 7 8 9", 0.0),
        ("-7", 0.0),
        ("17", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_of_an_answer_decides(answer: str, reward: float) -> None:
    assert load(EXAMPLES / "arithmetic" / "train.py").reward_of(answer, 7) == reward


def test_empty_constant_and_copied_answers_stay_below_what_the_untrained_model_gets() -> None:
    example = load(EXAMPLES / "arithmetic" / "train.py")
    tasks = example.make_tasks(example.Sums(), 0)

    def mean(policy: str) -> float:
        answers = [policy.format(**task) for task in tasks]
        return sum(example.reward_of(a, t["a"] + t["b"]) for a, t in zip(answers, tasks, strict=True)) / len(tasks)

    assert len(tasks) == 100
    assert mean("") == 0.0
    assert mean("9") == 0.1
    assert mean("What is {a} + {b}? Answer with the number only.") == 0.1
    assert mean(" ".join(map(str, range(19)))) == 0.01


@pytest.mark.parametrize(
    ("answer", "reward"), [("Blue", 1.0), ("Blue.", 1.0), ("Blue whale", 0.0), ("Blue\nGreen", 0.0), ("", 0.0)]
)
def test_one_word_is_one_word(answer: str, reward: float) -> None:
    assert load(EXAMPLES / "cocktail_small" / "one_word.py").reward_of(answer) == reward


def test_a_cocktail_goes_on_while_one_client_is_dead(tmp_path: Path) -> None:
    settings = yaml.safe_load((EXAMPLES / "cocktail_small" / "config.yaml").read_text())
    settings |= {"model": "tiny", "repeats": 2}
    settings["engine"] |= {"kind": "scripted", "script": "swarm_scripts:cocktail", "script_update_s": 0.3}
    settings["batching"] |= {"client_timeout_s": 6.0}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, EXAMPLES / "cocktail_small" / "run.py", "--config", config, "--out", tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(HERE)])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"step +(\d+) +sums +(\d+) +one-word +(\d+)", done.stdout)
    of_each = {int(step): (int(sums), int(words)) for step, sums, words in found}
    assert list(of_each) == list(range(1, 9))
    assert of_each[1] == (8, 8)
    assert of_each[4] == (8, 0), "the first client trains alone while the second is dead"
    assert of_each[8][0] == 8 and of_each[8][1] > 0, "the second client takes its share again"
