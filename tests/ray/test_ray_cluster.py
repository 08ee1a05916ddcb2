"""`ray.address` joins a cluster, leaves it running, and a rank that raises ends the update at once.

The cluster is started by this test on a port of its own and ended by its process ids.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_processes import PATIENCE_S, alive, descendants, until
from trainer_episodes import make_batch

from swarmtune.trainer.ray_session import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOURCE = str(Path(__file__).parents[2] / "core")
ENVIRONMENT = os.environ | QUIET | {"PYTHONPATH": SOURCE, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a Ray head that `ray start --head --block` runs below one child of ours."""
    folder = tempfile.mkdtemp(prefix="st-ray-")  # unix sockets lie in it: pytest's folders have too long names
    port = free_port()
    head = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"),
            *("--node-ip-address=127.0.0.1", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false"),
            *("--object-store-memory=100000000", f"--temp-dir={folder}", "--disable-usage-stats"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=ENVIRONMENT,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        below = [psutil.Process(head.pid), *descendants(head.pid)]
        os.killpg(head.pid, signal.SIGKILL)
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        head.wait()
        until(lambda: not alive(below), "the cluster's processes")
        shutil.rmtree(folder, ignore_errors=True)


def join(cluster: str, what: str, model: Path, work: Path) -> subprocess.Popen[str]:
    """`joining.py` in a process of its own: Ray's authentication mode is a process's for good."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "joining.py"), what, cluster, str(model), str(work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def answer(child: subprocess.Popen[str]) -> dict:
    out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def test_a_trainer_joins_a_cluster_and_a_rank_that_raises_ends_its_update(
    trainer, cluster: str, model_path: Path, tmp_path: Path
):
    until(lambda: listens(cluster), "the cluster's port")
    said = answer(join(cluster, "train", model_path, tmp_path))
    expected = trainer().update(make_batch(step=1))
    assert said["grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert "this rank has had enough" in said["raised"]
    assert "start again from the last checkpoint" in said["after"]
    assert listens(cluster)


def test_a_cluster_that_cannot_be_used_is_refused_at_once(cluster: str, model_path: Path, tmp_path: Path):
    until(lambda: listens(cluster), "the cluster's port")
    crowded = join(cluster, "crowd", model_path, tmp_path)
    nobody = f"127.0.0.1:{free_port()}"
    absent = join(nobody, "train", model_path, tmp_path)
    assert "ray.processes: 5 ranks take a processor each and 2" in answer(crowded)["refused"]
    assert f"ray.address: no Ray cluster can be joined at '{nobody}'" in answer(absent)["refused"]


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
