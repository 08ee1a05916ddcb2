"""The examples: the reward of the arithmetic example cannot be won cheaply."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
