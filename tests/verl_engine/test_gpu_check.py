"""scripts/gpu_check.sh: without a GPU it says so; its claims hold of the embedded engine, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarmtune import models

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run scripts/gpu_check.sh")
def test_without_a_gpu_it_says_so_and_ends_with_2():
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh")], env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2, done.stderr
    assert "SKIP  everything" in done.stdout
    assert "run this on a machine with an NVIDIA GPU" in done.stdout
    assert "verl 0.9.1" in done.stdout


@pytest.mark.timeout(500)
def test_every_claim_holds_of_the_embedded_engine():
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts/lib/gpu_check.py"), "--engine", "hf", "--dtype", "fp32"),
            *("--model", str(models.resolve("tiny"))),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=450,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert done.stdout.count("PASS") >= 14
    assert "PASS  a checkpoint brings its step back: version 2" in done.stdout
