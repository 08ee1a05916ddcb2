"""LoRA: an adapter folder that PEFT loads, and several trainings on one base model's files.

Rules:
1. The adapter folder gives, on the start model, the weights that the trainer hands out merged.
2. Trainings on one folder neither write to it nor see each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_episodes import make_batch

from swarmtune.trainer.trainer import Trainer

Make = Callable[..., Trainer]


def test_the_adapter_folder_loads_in_peft_and_merges_to_the_weights_handed_out(
    trainer: Make, plain_model, tmp_path: Path
):
    from peft import PeftModel

    made = trainer(**{"lora.rank": 4, "lora.alpha": 8, "lora.targets": ["q_proj", "down_proj"], "optim.lr": 1e-2})
    made.update(make_batch())
    folder = tmp_path / "adapter"
    folder.mkdir()
    made.save_adapter(folder)
    merged = PeftModel.from_pretrained(plain_model(), folder).merge_and_unload().state_dict()
    for name, value in made.weights():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6)
    moved = {n for n, v in plain_model().state_dict().items() if not torch.equal(v, merged[n])}
    assert moved and all(".q_proj." in n or ".down_proj." in n for n in moved)


def test_a_model_without_adapter_has_none_to_write(trainer: Make, tmp_path: Path):
    with pytest.raises(RuntimeError, match="configure lora"):
        trainer().save_adapter(tmp_path)


def test_two_trainings_on_one_base_model_do_not_see_each_other_and_leave_its_files(trainer: Make, model_path: Path):
    files = {p: hashlib.sha256(p.read_bytes()).digest() for p in model_path.iterdir()}
    alone = trainer(**{"lora.rank": 4, "optim.lr": 1e-2})
    for step in (1, 2):
        alone.update(make_batch(step=step))
    first, second = (trainer(**{"lora.rank": 4, "optim.lr": 1e-2}) for _ in range(2))
    for step in (1, 2):
        first.update(make_batch(step=step))
        second.update(make_batch(step=step, seed=5))
    ours, theirs, expected = ({n: v.clone() for n, v in t.weights()} for t in (first, second, alone))
    assert all(torch.equal(ours[n], expected[n]) for n in ours)
    assert any(not torch.equal(ours[n], theirs[n]) for n in ours)
    assert {p: hashlib.sha256(p.read_bytes()).digest() for p in model_path.iterdir()} == files
