"""cocktail: two clients in environments of their own share a training; it goes on while one of them is dead."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import environments
import pytest
import yaml
from example_runs import EXAMPLES, load

HERE = Path(__file__).parent
ROOT = EXAMPLES.parent


@pytest.mark.parametrize(
    ("answer", "reward"), [("Blue", 1.0), ("Blue.", 1.0), ("Blue whale", 0.0), ("Blue\nGreen", 0.0), ("", 0.0)]
)
def test_one_word_is_one_word(answer: str, reward: float):
    assert load("cocktail", "one_word").reward_of(answer) == reward


def small(folder: Path) -> Path:
    settings = yaml.safe_load((EXAMPLES / "cocktail" / "config.yaml").read_text())
    train = settings["train"]
    train |= {"model": "tiny", "repeats": 2}
    # Steps as long as a client takes to start: it is to be back before the last one.
    train["engine"] |= {"kind": "scripted", "script": "example_models:cocktail", "script_update_s": 2.0}
    train["batching"]["client_timeout_s"] = 6.0
    (folder / "config.json").write_text(json.dumps(settings))
    return folder / "config.json"


def test_a_cocktail_keeps_its_shares_and_goes_on_while_one_client_is_dead(tmp_path: Path):
    command = [sys.executable, EXAMPLES / "cocktail" / "run.py", "--config", small(tmp_path), "--out", tmp_path / "out"]
    done = subprocess.run(
        [*command, "--python", sys.executable],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(HERE)])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"step +(\d+) +sums +(\d+) \S+ +one-word +(\d+)", done.stdout)
    of_each = {int(step): (int(sums), int(words)) for step, sums, words in found}
    assert list(of_each) == list(range(1, 9))
    assert of_each[1] == of_each[2] == (8, 8), "both agreed to the step, each with its share"
    assert of_each[4] == (8, 0), "the first client trains alone while the second is dead"
    assert of_each[8][0] == 8 and of_each[8][1] > 0, "the second client has its share again"
    assert (tmp_path / "out" / "cocktail.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_client_runs_in_a_light_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "_fingerprint", lambda name: name)
    python = environments.python_of("one-word", tmp_path)
    names = {path.name for path in tmp_path.glob("one-word/lib/python3*/site-packages/*")}
    assert {"swarmtune", "httpx"} <= names and not names & {"openai", "torch", "verl", "numpy"}
    done = subprocess.run([python, EXAMPLES / "cocktail" / "one_word.py", "--help"], env={}, capture_output=True)
    assert b"--server" in done.stdout, done.stderr
    made = (tmp_path / "one-word" / ".stamp").stat().st_mtime_ns
    environments.python_of("one-word", tmp_path)
    assert (tmp_path / "one-word" / ".stamp").stat().st_mtime_ns == made, "it is not made twice"


def test_a_configuration_without_shares_is_refused_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "c.yaml").write_text("{train: {model: tiny}, steps: 2, parallel: 2, shares: {sums: 1}}")
    assert load("cocktail", "run").main(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "o")]) == 2
    assert "c.yaml: needs train, steps, parallel, and shares for sums and one-word" in capsys.readouterr().err
