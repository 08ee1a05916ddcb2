"""veRL on a CPU: the plugin is found by name, asks for nothing at import, and tracking goes to files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_episodes import make_batch

from swarmtune.config import ConfigError
from swarmtune.trainer.tracking import MODULES
from swarmtune.trainer.worker import ensure_process_group

CORE = Path(__file__).parents[2] / "core"


def run(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that finds the source checkout and no installed entry point of ours."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=inherited | {"PYTHONPATH": str(CORE), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_plugin_works_through_the_external_modules_variable():
    code = """
import verl
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
engines = [EngineRegistry.get_engine_cls(t, "fsdp2").__name__ for t in ("language_model", "value_model")]
print(get_device_name(), *engines)
"""
    out = run(code, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="swarmtune.trainer.cpu_platform")
    assert out == "cpu SelectiveFSDPEngine SelectiveValueEngine"


def test_importing_the_trainer_resolves_no_platform_and_leaves_the_environment_alone():
    code = """
import os
import verl.workers.config, verl.trainer.ppo.core_algos  # veRL sets a variable or two itself
before = dict(os.environ)
import swarmtune.trainer.trainer
import torch
from verl.plugin.platform import platform_manager
print(dict(os.environ) == before, platform_manager._current_platform, torch.distributed.is_initialized())
"""
    assert run(code) == "True None False"


def test_the_process_group_is_one_process_and_made_once():
    ensure_process_group()
    ensure_process_group()
    assert torch.distributed.get_world_size() == 1


def test_building_a_worker_leaves_the_environment_as_it_was(trainer):
    before = dict(os.environ)
    trainer()
    assert dict(os.environ) == before


def test_metrics_reach_tensorboard(trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    made = trainer(**{"tracking.backends": ["tensorboard"]})
    made.track(made.update(make_batch()), 1)
    made.close()
    assert "TENSORBOARD_DIR" not in os.environ
    (events,) = (tmp_path / "tensorboard").iterdir()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert "reward/mean" in read.Tags()["scalars"], events


def test_a_tracking_backend_that_is_not_installed_is_named(trainer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODULES, "wandb", "no_such_module")
    with pytest.raises(ConfigError, match=r"'wandb' needs the package 'no_such_module'"):
        trainer(**{"tracking.backends": ["wandb"]})
