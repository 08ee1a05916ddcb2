"""The `a3r` command as people type it: real processes, the goals that ship, the adaptive leader."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOALS = ROOT / "blueprints" / "goals"


def a3r(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "a3r.cli", *map(str, argv)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@functools.cache
def own_locks() -> str:
    """Slots are locked for the whole machine under TMPDIR; here other studies' runs are not waited for."""
    directory = tempfile.mkdtemp(prefix="a3r-test-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment() -> dict[str, str]:
    path = f"{ROOT / 'core'}{os.pathsep}{ROOT}"
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "160", "NO_COLOR": "1", "TMPDIR": own_locks()}


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A finished study of the goal that compares two recipes."""
    directory = tmp_path_factory.mktemp("cli") / "compare"
    out = a3r("research", GOALS / "compare.md", "--dir", directory, "--yes")
    assert out.returncode == 0, out.stdout + out.stderr
    assert "SUPPORTED: variant B is better than A" in out.stdout
    assert str(directory / "report" / "report.html") in out.stdout
    return directory


def test_a_study_leaves_a_report_that_verifies(done):
    assert (done / "report" / "report.html").stat().st_size > 1000
    out = a3r("report", "verify", done)
    assert out.returncode == 0, out.stdout


def test_status_why_show_and_cost_tell_what_happened(done):
    status = a3r("status", "--dir", done).stdout
    assert "variant=A" in status and "✓" in status and "variant B is better" in status
    facts = json.loads(a3r("status", "--dir", done, "--json").stdout)
    assert facts["state"] == "DONE" and facts["leader"] is False and len(facts["runs"]) == 10
    assert "run completed" in a3r("why", "variant=A/s1000", "--dir", done).stdout
    assert "attempt 1  DONE" in a3r("show", "variant=A/s1000", "--dir", done).stdout
    assert "runs 10/60" in a3r("cost", "--dir", done).stdout


def test_the_same_command_on_a_finished_study_says_the_answer_again(done):
    out = a3r("research", GOALS / "compare.md", "--dir", done, "--yes")
    assert out.returncode == 0 and "SUPPORTED" in out.stdout


def test_an_unknown_run_names_the_nearest(done):
    out = a3r("why", "variant=A/s1009", "--dir", done)
    assert out.returncode == 2 and "did you mean: variant=A/s1004" in out.stderr


def test_what_is_wrong_is_said_with_its_exit_status(tmp_path, done):
    missing = a3r("research", tmp_path / "nothing.md")
    assert missing.returncode == 2 and "no such file" in missing.stderr
    model = a3r("research", GOALS / "best.md", "--leader", "llm", "--dir", tmp_path / "x")
    assert model.returncode == 2 and "--model" in model.stderr
    other = a3r("research", GOALS / "best.md", "--dir", done)
    assert other.returncode == 2 and "another --dir" in other.stderr
    nowhere = a3r("status", "--dir", tmp_path)
    assert nowhere.returncode == 2 and "no study here" in nowhere.stderr
    vague = tmp_path / "vague.md"
    vague.write_text("Find out what matters.\n")
    assert a3r("research", vague, "--dir", tmp_path / "y").returncode == 3
    zero = tmp_path / "zero.md"
    zero.write_text((GOALS / "compare.md").read_text().replace("runs: 60", "runs: 0"))
    refused = a3r("research", zero, "--dir", tmp_path / "z")
    assert refused.returncode == 2 and "budget.runs" in refused.stderr


def test_killing_the_command_and_typing_it_again_goes_on(tmp_path):
    """A second one beside it is refused; `stop` from another terminal ends it."""
    directory = tmp_path / "study"
    slow = tmp_path / "slow.md"
    (tmp_path / "simulated.yaml").write_text(
        (ROOT / "blueprints" / "simulated.yaml").read_text().replace("step_s: 0.02", "step_s: 3.0")
    )
    slow.write_text((GOALS / "compare.md").read_text().replace("../simulated.yaml", "simulated.yaml"))
    argv = [sys.executable, "-m", "a3r.cli", "research", str(slow), "--dir", str(directory), "--yes", "--no-windows"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def until(condition, what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    first = start()
    until(lambda: list(directory.glob("runs/*/*/attempts/1/claim")), "a run starts")
    assert a3r("research", slow, "--dir", directory, "--yes").returncode == 5
    first.kill()
    first.wait()
    second = start()
    until(lambda: '"epoch":2' in (directory / "events.jsonl").read_text().replace("\\", ""), "the second one leads")
    stopped = a3r("stop", "--dir", directory, "--reason", "seen enough")
    assert "stop: done" in stopped.stdout
    assert second.wait(timeout=60) == 0
    assert "seen enough" in (directory / "report" / "report.md").read_text()


def test_stop_ends_a_study_whose_leader_is_gone(tmp_path):
    text = (ROOT / "blueprints" / "simulated.yaml").read_text()
    (tmp_path / "simulated.yaml").write_text(text.replace("step_s: 0.02", "step_s: 3.0"))
    goal, directory = tmp_path / "slow.md", tmp_path / "study"
    goal.write_text((GOALS / "compare.md").read_text().replace("../simulated.yaml", "simulated.yaml"))
    argv = [sys.executable, "-m", "a3r.cli", "research", str(goal), "--dir", str(directory), "--no-windows"]
    leader = subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list(directory.glob("runs/*/*/attempts/1/claim")):
        assert time.monotonic() < deadline, "a run starts"
        time.sleep(0.05)
    leader.kill()
    leader.wait()
    assert a3r("stop", "--dir", directory, "--reason", "seen enough").returncode == 0
    assert "seen enough" in (directory / "report" / "report.md").read_text()
    assert "the study is done" in a3r("stop", "--dir", directory).stdout


def test_a_goal_that_asks_for_approval_waits_for_it(tmp_path):
    goal = tmp_path / "careful.md"
    text = (GOALS / "compare.md").read_text().replace("../simulated.yaml", str(ROOT / "blueprints" / "simulated.yaml"))
    goal.write_text(text.replace("approve: none", "approve: plan"))
    directory = tmp_path / "study"
    argv = [sys.executable, "-m", "a3r.cli", "research", str(goal), "--dir", str(directory), "--no-windows"]
    leader = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while "waits for  approval" not in (shown := a3r("status", "--dir", directory).stdout):
        assert time.monotonic() < deadline and leader.poll() is None, shown
    assert a3r("approve", "0123", "--dir", directory).returncode == 2
    assert "approve: done" in a3r("approve", "--dir", directory).stdout
    assert leader.wait(timeout=60) == 0


def test_the_command_stays_light():
    program = "import sys, a3r.cli, a3r.research, a3r.live; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert not {"torch", "ray", "verl", "vllm", "transformers", "matplotlib"} & set(out.stdout.split())
