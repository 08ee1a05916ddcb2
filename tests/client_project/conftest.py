"""Client projects written for a test, and the parts of the checker that play them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from a3r.client.check import Options, Report, check_project
from a3r.client.probe import Player
from swarmtune.rehearsal import Rehearsal

TRAIN = """
import openai
from swarmtune.script import Parameters, Script, run

def tasks(parameters, seed):
    return [{"task_id": f"t{i}", "n": i} for i in range(20)]

def ask(task, episode):
    llm = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    messages = [{"role": "user", "content": f"Say {task['n']}"}]
    return llm.chat.completions.create(model="m", messages=messages, max_tokens=16).choices[0].message.content or ""

def rollout(task, episode):
    said = ask(task, episode)
    return float(said.strip() == str(task["n"]))

SCRIPT = Script(name="t", tasks=tasks, rollout=rollout, defaults={"model": "tiny", "batch_tasks": 4, "repeats": 2})
"""
"""An honest client; tests replace a part of it."""

CHECKS = """
def random_answer(task, messages, rng):
    return str(rng.randrange(20))

def good_answer(task, messages):
    return str(task["n"])
"""

Write = Callable[..., Path]
Check = Callable[..., Report]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a project: TRAIN with `old` replaced by `new`, and CHECKS."""

    def write(old: str = "", new: str = "", *, train: str = TRAIN, checks: str | None = CHECKS) -> Path:
        assert old in train
        folder = tmp_path / "project"
        folder.mkdir()
        (folder / "train.py").write_text(train.replace(old, new) if old else train)
        if checks is not None:
            (folder / "checks.py").write_text(checks)
        return folder

    return write


@pytest.fixture
def check(write: Write) -> Check:
    """Write a project as `write` does and check it."""

    def check(old: str = "", new: str = "", *, limit_s: float = 30.0, **options: str | None) -> Report:
        return check_project(write(old, new, **options), Options(limit_s=limit_s, episodes=16))

    return check


@pytest.fixture(scope="session")
def stage() -> Iterator[Rehearsal]:
    with Rehearsal() as running:
        yield running


@pytest.fixture
def player(stage: Rehearsal) -> Player:
    return Player(stage, 60.0)
