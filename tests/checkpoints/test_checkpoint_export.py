"""Exports: folders that transformers and peft load with the weights of the step, complete or absent.

Rules:
1. The exported model gives the trainer's logits exactly, adapters merged; a peft folder gives them with its base.
2. Configuration, tokenizer, chat template and generation settings of the start model are in the folder.
3. Whatever interrupts an export, nothing is at its place; what is there already is not touched.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_parts import saved, step
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from swarmtune.export_process import ExportFailed, export_apart
from swarmtune.gateway.control import ControlRefused
from swarmtune.protocol import Code, ExportRequest
from swarmtune.testing import LocalServer
from swarmtune.trainer import export as exporting
from swarmtune.trainer.export import ORIGIN, ExportRefused, export
from swarmtune.trainer.trainer import Trainer

Make = Callable[..., tuple[Trainer, Path]]
IDS = torch.arange(40)[None] * 37 % 250


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def logits_of(trainer: Trainer, start: Path) -> torch.Tensor:
    """Of the trainer's weights, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    state = {name: value.clone() for name, value in trainer.weights()}
    model.load_state_dict(state, strict=False)
    return logits(model)


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 4}, {"lora.rank": 2, "lora.targets": ["q_proj", "down_proj"]}])
def test_an_exported_model_gives_the_trainers_logits(trained: Make, tiny_llama: Path, tmp_path: Path, keys: dict):
    trainer, run = trained(**keys)
    done = export(saved(trainer, run), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = logits_of(trainer, tiny_llama)
    assert loaded.dtype == torch.float32 and done.step == 1
    assert torch.equal(logits(loaded), expected)
    start = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    assert not torch.allclose(logits(start), expected, atol=1e-3)


def test_an_exported_adapter_gives_the_trainers_logits_with_its_base(trained: Make, tiny_llama: Path, tmp_path: Path):
    from peft import PeftModel

    trainer, run = trained(**{"lora.rank": 4})
    export(saved(trainer, run), tmp_path / "adapter", adapter=True)
    start = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(start, tmp_path / "adapter")
    torch.testing.assert_close(logits(with_adapter), logits_of(trainer, tiny_llama), atol=1e-4, rtol=1e-4)
    assert json.loads((tmp_path / "adapter" / ORIGIN).read_text())["kind"] == "adapter"


def test_an_export_has_tokenizer_template_settings_and_origin(trained: Make, tiny_llama: Path, tmp_path: Path):
    trainer, run = trained()
    export(saved(trainer, run), tmp_path / "out", dtype="bf16")
    talk = [{"role": "user", "content": "hi"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False)
        for folder in (tiny_llama, tmp_path / "out")
    ]
    assert texts[0] == texts[1]
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == GenerationConfig.from_pretrained(tiny_llama).eos_token_id
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    origin = json.loads((tmp_path / "out" / ORIGIN).read_text())
    digest = exporting.config_digest(exporting.TrainConfig.from_dict(json.loads((run / "config.json").read_text())))
    assert (origin["run"], origin["step"], origin["dtype"]) == (str(run.resolve()), 1, "bf16")
    assert origin["config_sha256"] == digest
    on_disk = {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir() if p.name != ORIGIN}
    assert origin["files"] == on_disk


@pytest.mark.parametrize("adapter", [False, True])
def test_who_may_read_an_export_is_the_umasks_to_say(trained: Make, tmp_path: Path, adapter: bool):
    trainer, run = trained(**({"lora.rank": 4} if adapter else {}))
    before = os.umask(0o027)
    try:
        export(saved(trainer, run), tmp_path / "out", adapter=adapter)
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "out").iterdir()} == {"0o640"}


def test_shards_of_several_ranks_are_put_together(trained: Make, tmp_path: Path):
    trainer, run = trained()
    whole = saved(trainer, run)
    state = exporting.read_weights(whole)
    parts = tmp_path / "parts"
    parts.mkdir()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    for rank in range(2):
        halves = {
            name: DTensor.from_local(tensor.chunk(2)[rank].clone(), mesh, [Shard(0)], run_check=False)
            for name, tensor in state.items()
        }
        torch.save(halves, parts / f"model_world_size_2_rank_{rank}.pt")
    joined = exporting.read_weights(parts)
    assert joined.keys() == state.keys() and all(torch.equal(joined[n], state[n]) for n in state)
    (parts / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ExportRefused, match="2 expected, 1 there"):
        exporting.read_weights(parts)


def test_what_is_there_is_not_touched_and_the_same_export_again_is_found_done(trained: Make, tmp_path: Path):
    trainer, run = trained()
    checkpoint = saved(trainer, run)
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out")
    at = (tmp_path / "out" / ORIGIN).stat().st_mtime_ns
    assert export(checkpoint, tmp_path / "out").step == 1
    assert (tmp_path / "out" / ORIGIN).stat().st_mtime_ns == at
    with pytest.raises(ExportRefused, match="is there already"):
        export(checkpoint, tmp_path / "out", dtype="bf16")


@pytest.mark.parametrize("moment", ["weights", "configuration", "flush", "rename"])
def test_an_interrupted_export_leaves_nothing(
    trained: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    trainer, run = trained()
    checkpoint = saved(trainer, run)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place, name = {
        "weights": ("huggingface_hub.save_torch_state_dict", None),
        "configuration": (Path, "write_text"),
        "flush": (os, "fsync"),
        "rename": (Path, "rename"),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(place, full) if name is None else patch.setattr(place, name, full)
        with pytest.raises(OSError, match="No space left"):
            export(checkpoint, tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []
    assert export(checkpoint, tmp_path / "exports" / "out").step == 1


def test_space_is_looked_for_before_anything_is_written(trained: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer, run = trained()
    checkpoint = saved(trainer, run)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        with pytest.raises(OSError, match=r"the export needs .* MB and 0 MB are free") as caught:
            export(checkpoint, tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC and not (tmp_path / "out").exists()


def test_what_cannot_be_exported_says_why(trained: Make, tmp_path: Path):
    trainer, run = trained()
    checkpoint = saved(trainer, run)
    with pytest.raises(ExportRefused, match="trained without lora"):
        export(checkpoint, tmp_path / "out", adapter=True)
    moved = shutil.copytree(checkpoint, tmp_path / "a" / "b" / "moved")
    with pytest.raises(ExportRefused, match="--model"):
        export(moved, tmp_path / "out")
    with pytest.raises(ExportRefused, match="no complete checkpoint"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_taken_out_of_its_run_is_exported_with_its_start_model(
    trained: Make, tiny_llama: Path, tmp_path: Path
):
    trainer, run = trained()
    moved = shutil.copytree(saved(trainer, run), tmp_path / "a" / "b" / "moved")
    export(moved, tmp_path / "out", model=str(tiny_llama), dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(loaded), logits_of(trainer, tiny_llama))


async def test_the_servers_export_runs_in_a_process_of_its_own(trained: Make, tmp_path: Path):
    trainer, run = trained()
    checkpoint = saved(trainer, run)
    trees = []
    for name in ("here", "apart"):
        if name == "here":
            export(checkpoint, tmp_path / name)
        else:
            done = await export_apart(checkpoint, ExportRequest(path=str(tmp_path / name)))
            assert (done.step, done.path) == (1, str(tmp_path / name))
        trees.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.name != ORIGIN})
    assert trees[0] == trees[1]
    with pytest.raises(ExportFailed, match="without lora") as refused:
        await export_apart(checkpoint, ExportRequest(path=str(tmp_path / "no"), adapter=True))
    assert refused.value.code is Code.BAD_REQUEST


async def test_a_running_server_exports_a_step_it_has_and_keeps_it_meanwhile(tmp_path, model, monkeypatch):
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**{"checkpoint.keep_last": 1})
        await step(local)
        begun, go_on, seen = asyncio.Event(), asyncio.Event(), []

        async def slow(checkpoint: Path, request: ExportRequest):
            begun.set()
            await go_on.wait()
            seen.append(checkpoint.is_dir())
            raise ExportFailed(Code.BAD_REQUEST, "read it")

        monkeypatch.setattr("swarmtune.server.export_apart", slow)
        exporting_now = asyncio.create_task(local.server.export(ExportRequest(path="/nowhere", step=1)))
        await begun.wait()
        await step(local)
        await step(local)
        assert [v.step for v in local.server.checkpoints()] == [1, 3]
        go_on.set()
        with pytest.raises(ControlRefused, match="read it"):
            await exporting_now
        assert seen == [True]
        with pytest.raises(ControlRefused, match="no checkpoint of step 7"):
            await local.server.export(ExportRequest(path="/nowhere", step=7))


async def test_the_scripted_engine_has_nothing_to_export(tmp_path, model):
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot()
        await step(local)
        with pytest.raises(ControlRefused, match="scripted engine, which has no weights"):
            await local.server.export(ExportRequest(path=str(tmp_path / "out")))
        assert not (tmp_path / "out").exists()
