"""Checkpoints are complete or absent, and resuming continues as if nothing had happened.

Rules:
1. k steps + save + load + 1 step gives the weights of k + 1 steps, bit for bit.
2. Whatever interrupts a save, the previous checkpoint loads.
3. Space is checked before anything is written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_episodes import make_batch

from swarmtune.config import ConfigError
from swarmtune.trainer import checkpoint
from swarmtune.trainer.trainer import Trainer

Make = Callable[..., Trainer]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lora.rank": 4},
        {"algorithm.mini_batches": 2, "algorithm.epochs": 2, "algorithm.policy_loss": "clip_cov"},
        {"optim.schedule": "cosine", "optim.total_steps": 5, "optim.warmup_steps": 2, "algorithm.kl_coef": 0.1},
    ],
    ids=["plain", "lora", "shuffled and random", "schedule and kl"],
)
def test_resuming_continues_bit_for_bit(trainer: Make, tmp_path: Path, keys: dict):
    straight = trainer(**keys)
    for step in (1, 2):
        straight.update(make_batch(step=step))
    straight.save(tmp_path / "step-2")
    expected = straight.update(make_batch(step=3))

    resumed = trainer(resume=tmp_path / "step-2", **keys)
    assert resumed.step == 2
    metrics = resumed.update(make_batch(step=3))
    assert same(weights(straight), weights(resumed))
    assert metrics["actor/grad_norm"] == expected["actor/grad_norm"]
    assert metrics["actor/lr"] == expected["actor/lr"]


def test_optimizer_settings_are_the_configurations_after_resuming(trainer: Make, tmp_path: Path):
    trainer().save(tmp_path / "start")
    made = trainer(resume=tmp_path / "start", **{"optim.weight_decay": 0.5, "optim.betas": [0.5, 0.9]})
    fresh = trainer(**{"optim.weight_decay": 0.5, "optim.betas": [0.5, 0.9]})
    for step in (1, 2):
        made.update(make_batch(step=step))
        fresh.update(make_batch(step=step))
    assert same(weights(made), weights(fresh))


def test_saving_again_to_the_same_place_replaces_it(trainer: Make, tmp_path: Path):
    made = trainer()
    made.save(tmp_path / "last")
    made.update(make_batch())
    made.save(tmp_path / "last")
    assert trainer(resume=tmp_path / "last").step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("moment", ["while writing", "before the state", "while flushing", "at the rename"])
def test_an_interrupted_save_leaves_the_previous_one(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    made = trainer()
    made.save(tmp_path / "last")
    before = weights(made)
    made.update(make_batch())

    class PowerCut(BaseException):
        pass

    def cut(*_: object, **__: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        if moment == "while writing":
            patch.setattr(torch, "save", cut)
        elif moment == "before the state":
            patch.setattr(Path, "write_text", cut)
        elif moment == "while flushing":
            patch.setattr(os, "fsync", cut)
        else:
            patch.setattr(Path, "rename", cut)
        with pytest.raises(PowerCut):
            made.save(tmp_path / "last")
    resumed = trainer(resume=tmp_path / "last")
    assert resumed.step == 0
    assert same(before, weights(resumed))
    made.save(tmp_path / "last")
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_crash_between_the_two_renames_is_recovered(tmp_path: Path):
    checkpoint.write(tmp_path / "last", {"step": 1}, lambda _: None, needed_bytes=0)
    (tmp_path / "last").rename(tmp_path / f"{checkpoint.RETIRED}last")
    (tmp_path / f"{checkpoint.PARTIAL}last").mkdir()
    assert checkpoint.read(tmp_path / "last")["step"] == 1


def test_no_space_is_said_before_anything_is_written(trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = trainer()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"a checkpoint needs .* MB") as caught:
        made.save(tmp_path / "saves" / "last")
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "saves").iterdir()) == []


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 4}], ids=["full", "lora"])
def test_the_space_asked_for_covers_what_is_written(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict
):
    made = trainer(**keys)
    made.update(make_batch())
    asked = []
    write = checkpoint.write

    def spy(*args, needed_bytes: int, **rest) -> None:
        asked.append(needed_bytes)
        write(*args, needed_bytes=needed_bytes, **rest)

    monkeypatch.setattr(checkpoint, "write", spy)
    made.save(tmp_path / "last")
    written = sum(f.stat().st_size for f in (tmp_path / "last").rglob("*") if f.is_file())
    assert written <= asked[0] <= written + (20 << 20)


def test_resuming_from_nothing_names_the_folder(trainer: Make, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint.*absent"):
        trainer(resume=tmp_path / "absent")


def test_resuming_with_another_adapter_is_refused(trainer: Make, tmp_path: Path):
    trainer().save(tmp_path / "full")
    with pytest.raises(ConfigError, match="lora"):
        trainer(resume=tmp_path / "full", **{"lora.rank": 4})


def test_another_format_is_refused(tmp_path: Path):
    checkpoint.write(tmp_path / "old", {}, lambda _: None, needed_bytes=0)
    (tmp_path / "old" / checkpoint.STATE).write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="format 0"):
        checkpoint.read(tmp_path / "old")
