"""The contract of a training script: its command line, its files, its exit status. Run as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.client.client_parts import HERE, until

ROOT = HERE.parents[1]
TRAIN = ROOT / "examples" / "arithmetic" / "train.py"
SCRIPTED = {
    "model": "tiny",
    "engine": {"kind": "scripted", "script": "swarm_scripts:sums"},
    "batch_tasks": 2,
    "repeats": 3,
    "steps": 3,
    "checkpoint.every_steps": 1,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SCRIPTED))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(TRAIN), *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(HERE)])}


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=120)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(out: Path) -> list[int]:
    return [row["step"] for row in rows(out / "metrics.jsonl")]


def test_a_run_leaves_its_files_and_no_process(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = train("--config", config, "--seed", 5, "--set", "optim.lr=1e-5", "--set", "eval.repeats=2", "--out", out)
    assert done.returncode == 0, done.stderr
    assert steps(out) == [1, 2, 3]
    assert all(0.0 <= row["reward/mean"] <= 1.0 for row in rows(out / "metrics.jsonl"))
    resolved = json.loads((out / "resolved_config.json").read_text())
    assert (resolved["seed"], resolved["optim"]["lr"], resolved["task"]["largest"]) == (5, 1e-5, 9)
    evaluation = json.loads((out / "eval.json").read_text())
    assert evaluation["eval/pass@2"]["n_items"] == 100
    assert {"state", "step", "episode"} <= {row["kind"] for row in rows(out / "events.jsonl")}
    assert Image.open(out / "reward.png").size[0] > 400
    assert str(out) in done.stderr
    assert servers_of(out) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "optim.rl=1"], "did you mean 'optim.lr'"),
        (["--set", "task.largst=1"], "did you mean 'task.largest'"),
        (["--set", "repeats=1"], "repeats"),
        (["--set", "steps"], "key=value"),
        (["--set", "model=no-such-model"], "smollm2-135m"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--server", "127.0.0.1:10086"], "such as http://127.0.0.1:10086"),
    ],
)
def test_wrong_input_ends_with_2_and_says_what_is_wrong(
    config: Path, tmp_path: Path, arguments: Sequence[str], said: str
) -> None:
    done = train("--config", config, "--out", tmp_path / "out", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_model_that_cannot_be_brought_up_ends_with_3(config: Path, tmp_path: Path) -> None:
    done = train("--config", config, "--out", tmp_path / "out", "--set", "engine.script=no_such_module:f")
    assert done.returncode == 3
    assert "no_such_module" in done.stderr


def test_nobody_at_the_server_address_ends_with_3(config: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'train.py'; import swarmtune.script as s; s.PATIENCE_S = 0.2; "
        f"sys.path.insert(0, {str(TRAIN.parent)!r}); from train import ARITHMETIC; s.run(ARITHMETIC)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", str(config), "--server", "http://127.0.0.1:9", "--out", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "http://127.0.0.1:9" in done.stderr


def test_a_terminated_run_ends_its_server_and_can_be_resumed(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--config", config, "--out", out, "--set", "engine.script_update_s=0.3"]
    process = subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.DEVNULL)
    until(lambda: (out / "metrics.jsonl").exists(), "the first step", 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert servers_of(out) == []

    done = train(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert steps(out) == [1, 2, 3]


def test_a_killed_run_ends_its_server_and_can_be_resumed_elsewhere(config: Path, tmp_path: Path) -> None:
    first, second, state = tmp_path / "first", tmp_path / "second", tmp_path / "state"
    arguments = ["--config", config, "--state", state, "--set", "engine.script_update_s=0.3"]
    process = subprocess.Popen(command(*arguments, "--out", first), env=environment(), stderr=subprocess.DEVNULL)
    until(lambda: (first / "metrics.jsonl").exists(), "the first step", 60)
    process.kill()
    process.wait()
    until(lambda: not servers_of(state), "the server is gone")

    done = train(*arguments, "--out", second, "--resume")
    assert done.returncode == 0, done.stderr
    assert steps(second) == [1, 2, 3]


def test_a_run_without_resume_starts_anew(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        assert train("--config", config, "--out", out, "--steps", 1).returncode == 0
    assert steps(out) == [1]


def test_the_schema_lists_every_key_and_starts_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--print-schema"), env=environment(), capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    schema = json.loads(done.stdout)
    assert {"optim", "batch_tasks", "steps", "task", "model"} <= schema["properties"].keys()
    assert "model" not in schema.get("required", [])
    assert list(tmp_path.iterdir()) == []


def servers_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    return [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if "serve" in (p.info["cmdline"] or []) and any(str(folder) in word for word in p.info["cmdline"])
    ]
