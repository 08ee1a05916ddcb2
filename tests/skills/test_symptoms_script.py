"""debug-training's symptoms.py names what a training's files show, also of one that died before its first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from skill_stage import ROOT

SYMPTOMS = ROOT / "skills" / "debug-training" / "scripts" / "symptoms.py"


def symptoms(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(SYMPTOMS), str(folder)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def aborted(folder: Path, *reasons: str) -> None:
    events = [{"kind": "episode", "data": {"id": str(at), "aborted": reason}} for at, reason in enumerate(reasons)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_training_that_never_did_a_step_is_diagnosed_by_its_events(tmp_path: Path) -> None:
    aborted(tmp_path, *["RuntimeError: OPPONENT_URL is set and its key is not: put the key into OPPONENT_KEY"] * 3)
    status, said = symptoms(tmp_path)
    assert status == 1 and "3 times aborted: RuntimeError" in said and "put the key into OPPONENT_KEY" in said


def test_reasons_that_differ_in_their_numbers_are_one(tmp_path: Path) -> None:
    aborted(tmp_path, *[f"BadRequestError: your messages resulted in {n} tokens" for n in (338, 341, 1344)])
    status, said = symptoms(tmp_path)
    assert status == 1 and said.count("episodes-lost") == 1 and "resulted in 338 tokens" in said


def test_a_folder_without_a_training_is_said(tmp_path: Path) -> None:
    status, said = symptoms(tmp_path)
    assert status == 2 and said.startswith("nothing to read") and "metrics.jsonl" in said


def test_a_healthy_training_has_no_symptom(tmp_path: Path) -> None:
    row = {"step": 1, "reward/mean": 0.4, "reward/std": 0.3, "episodes/trained": 8}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert symptoms(tmp_path)[0] == 0
