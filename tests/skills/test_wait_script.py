"""monitor-training's wait.py returns as soon as it can, with a status that says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from skill_stage import ROOT

WAIT = ROOT / "skills" / "monitor-training" / "scripts" / "wait.py"
FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


def wait(*arguments: object, cwd: Path) -> tuple[int, str]:
    argv = [sys.executable, str(WAIT), *map(str, arguments)]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def running() -> object:
    process = subprocess.Popen(FOREVER)
    yield process
    process.kill()
    process.wait()


def rows(folder: Path, *rewards: float) -> None:
    lines = [json.dumps({"step": at, "reward/mean": reward}) for at, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_step_that_is_done_is_reached_at_once(tmp_path: Path, running) -> None:
    rows(tmp_path, 0.1, 0.2)
    status, said = wait("--metrics", "metrics.jsonl", "--step", 2, "--pid", running.pid, "--limit-s", 60, cwd=tmp_path)
    assert (status, said) == (0, "step 2 is done; last step 2, reward/mean 0.200\n")


def test_a_process_that_ends_before_is_told_at_once(tmp_path: Path) -> None:
    rows(tmp_path, 0.1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    status, said = wait("--metrics", "metrics.jsonl", "--step", 9, "--pid", ended.pid, "--limit-s", 60, cwd=tmp_path)
    assert status == 3 and "has ended; last step 1" in said


def test_a_zombie_has_ended(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])  # nobody waits for it
    try:
        assert wait("--end", "--pid", zombie.pid, "--limit-s", 60, cwd=tmp_path)[0] == 0
    finally:
        zombie.wait()


def test_a_metric_that_moves_either_way_is_reached(tmp_path: Path) -> None:
    rows(tmp_path, 0.5, 0.45, 0.2)
    asked = ("--metrics", "metrics.jsonl", "--metric", "reward/mean", "--limit-s", 1)
    assert wait(*asked, "--moves", 0.25, cwd=tmp_path)[0] == 0
    assert wait(*asked, "--below", 0.3, cwd=tmp_path)[0] == 0
    assert wait(*asked, "--above", 0.3, cwd=tmp_path)[0] == 124


def test_a_bad_line_ends_the_waiting(tmp_path: Path, running) -> None:
    (tmp_path / "log").write_text("well\nTraceback (most recent call last)\n")
    asked = ("--log", "log", "--line", "never", "--bad", "Traceback", "--pid", running.pid, "--limit-s", 60)
    status, said = wait(*asked, cwd=tmp_path)
    assert status == 5 and "logged: Traceback" in said


def test_a_torn_last_line_is_left_for_later(tmp_path: Path) -> None:
    rows(tmp_path, 0.1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    status, said = wait("--metrics", "metrics.jsonl", "--step", 2, "--limit-s", 1, cwd=tmp_path)
    assert status == 124 and "last step 1" in said


def test_a_server_answers_for_its_steps(tmp_path: Path, url: str) -> None:
    assert wait("--server", url, "--step", 0, "--limit-s", 0, cwd=tmp_path)[0] in {0, 124}
    assert wait("--server", url, "--step", 10**6, "--limit-s", 1, cwd=tmp_path)[0] == 124


@pytest.mark.parametrize(
    "arguments",
    [
        ["--limit-s", 1],
        ["--step", 1, "--limit-s", 1],
        ["--metrics", "m", "--metric", "x", "--limit-s", 1],
        ["--metrics", "m", "--above", 1, "--limit-s", 1],
        ["--line", "x", "--limit-s", 1],
        ["--end", "--limit-s", 1],
        ["--metrics", "m", "--step", 1],
    ],
)
def test_a_command_line_that_cannot_end_well_is_refused(arguments: list[object], tmp_path: Path) -> None:
    assert wait(*arguments, cwd=tmp_path)[0] == 2
