"""Where a Ray of our own keeps its files, and who cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.trainer.ray_session import (
    SOCKET_LIMIT,
    SOCKET_TAIL,
    TEMP_PREFIX,
    RaySession,
    clear_temp_dirs,
    temp_dir,
)


def test_sockets_fit_wherever_the_work_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    short, long = Path("/tmp/w"), tmp_path / ("x" * 60)
    assert temp_dir(short) == short / "ray"
    assert len(os.fsencode(temp_dir(long))) + SOCKET_TAIL <= SOCKET_LIMIT
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    assert temp_dir(long) == Path("/tmp") / f"{TEMP_PREFIX}{os.getuid()}-{os.getpid()}"


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours, left, living = (tmp_path / f"{TEMP_PREFIX}{os.getuid()}-{pid}" for pid in (os.getpid(), gone.pid, 1))
    for folder in (ours, left, living):
        (folder / "session").mkdir(parents=True)
    clear_temp_dirs(ours)
    assert [path.name for path in tmp_path.iterdir()] == [living.name]


def test_more_ranks_than_the_machine_has_processors_are_refused_before_ray_is_started(tmp_path: Path):
    config = TrainConfig.from_dict({"model": "tiny", "ray.processes": 4096})
    with pytest.raises(ConfigError, match=r"ray\.processes: 4096 ranks on a machine of .* ray\.address"):
        RaySession(config, tmp_path)
    assert not list(tmp_path.iterdir())
