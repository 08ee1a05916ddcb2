"""The benchmark is killed anywhere: no run is made twice, none is skipped, nothing is left over."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("bench_driver.py")
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

UNDECIDED = 3
"""How a whole run of these commits ends: the first has nothing to be compared with."""


def drive(project, point="never", hit=1):
    return subprocess.Popen(
        [sys.executable, str(DRIVER), str(project.root), str(project.folder), point, str(hit)],
        env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    _, err = process.communicate(timeout=120)
    assert process.returncode in (UNDECIDED, -signal.SIGKILL), err
    return process.returncode


@pytest.fixture
def three(project):
    """Three commits without a change between them: six runs, and nothing to confirm."""
    project.commit(10.05)
    project.commit(10.02)
    return project


def check(project):
    made = Counter((r["speed"], r["seed"]) for r in project.runs())
    assert made == Counter({(speed, seed): 1 for speed in (10.0, 10.05, 10.02) for seed in "12"})
    assert not project.left_over()
    assert not list((project.folder / "work" / "attempts").glob("*/*/*"))
    session = project.session()
    assert all(session.complete(session.suites[0], c) for c in session.history.first_parents("HEAD"))


@pytest.mark.parametrize(("point", "hit"), [
    ("worktree added", 2), ("prepared", 1), ("started", 3), ("finished", 4), ("stored", 2), ("judging", 1),
])  # fmt: skip
def test_a_kill_at_any_point_costs_no_run_and_repeats_none(three, point, hit):
    assert finish(drive(three, point, hit)) == -signal.SIGKILL
    finish(drive(three))
    check(three)


@pytest.mark.slow
def test_kills_at_random_moments(three):
    draw = random.Random(7)
    for _ in range(8):
        process = drive(three)
        try:
            process.communicate(timeout=draw.uniform(0.2, 2.5))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    finish(drive(three))
    check(three)


def test_a_run_whose_supervisor_is_killed_is_made_again(three):
    process = drive(three)
    deadline = time.monotonic() + 60
    killed = False
    while not killed and time.monotonic() < deadline and process.poll() is None:
        for claim in (three.folder / "work" / "attempts").glob("*/*/*/1/claim"):
            try:
                os.kill(json.loads(claim.read_text())["pid"], signal.SIGKILL)
                killed = True
                break
            except (OSError, ValueError):
                continue
    finish(process)
    session = three.session()
    assert all(session.complete(session.suites[0], c) for c in session.history.first_parents("HEAD"))
