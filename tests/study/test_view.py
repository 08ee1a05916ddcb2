"""tmux is a window: a run's processes can be seen in it, and losing it loses nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from campaigns import FAST, base_blueprint, decision_of, goal_lock
from test_campaign import kinds, tick_until

from a3r.executors.local import LocalExecutor, session_name

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def tmux(executor: LocalExecutor, *argv: str) -> str:
    return subprocess.run(
        ["tmux", "-L", executor.socket, *argv], capture_output=True, text=True, timeout=20, check=False
    ).stdout


@pytest.fixture
def watched(campaign):
    """A campaign with two-process runs and windows."""
    client = base_blueprint().main.model_dump() | {"needs": ["server"]}
    program = "import time; print('hello from the server', flush=True); time.sleep(60)"
    server = {"name": "server", "argv": ["{python}", "-c", program]}
    base = base_blueprint(config={"step_s": 0.2}, processes=[server, client])
    directory = campaign.create(lock=goal_lock(base))
    study = campaign.open(directory, replace(FAST, view=True, view_check_s=0.05))
    tick_until(study, lambda: len([a for a in study.open_attempts() if a["state"] == "RUNNING"]) == 2, "two run")
    yield study
    study.executors["local"].close_view()
    study.close()


def test_each_process_has_a_window_of_its_own(watched):
    executor = watched.executors["local"]
    attempt = watched.open_attempts()[0]
    session = session_name(attempt["run"], attempt["n"])
    assert tmux(executor, "list-windows", "-t", f"={session}", "-F", "#W").split() == ["server", "client"]
    tick_until(
        watched,
        lambda: "hello from the server" in tmux(executor, "capture-pane", "-p", "-t", f"={session}:server"),
        "the log shows",
    )
    assert executor.attach_argv(watched.handle(attempt))[:3] == ["tmux", "-L", executor.socket]


def test_killing_tmux_loses_the_view_and_nothing_else(watched):
    executor = watched.executors["local"]
    pid = int(tmux(executor, "display-message", "-p", "#{pid}"))
    os.kill(pid, 9)
    handles = [watched.handle(a) for a in watched.open_attempts()]
    tick_until(watched, lambda: not any(executor.lost_view(h) for h in handles) or not watched.open_attempts(), "back")
    watched.run()
    assert decision_of(watched.directory)["level"] == 1.0
    assert kinds(watched.directory)["ATTEMPT_LOST"] == 0
    assert not tmux(executor, "list-sessions"), "windows are closed at the end of a study"


def test_other_tmux_servers_are_left_alone(watched):
    sockets = {watched.executors["local"].socket}
    assert all(s.startswith("a3r-") for s in sockets) and "default" not in sockets
