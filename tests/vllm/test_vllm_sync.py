"""What of a weight sync happens without a server: files written, handles exported, routes in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swarmtune.engines import vllm_sync
from swarmtune.engines.vllm_sync import FileSync, IpcSync, write_weights


class Recorder:
    """A client that notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def pause(self) -> None:
        self.calls.append("/pause")

    async def resume(self) -> None:
        self.calls.append("/resume")

    async def reset_prefix_cache(self) -> None:
        self.calls.append("/reset_prefix_cache")

    async def call(self, path: str, body: Any = None) -> None:
        self.calls.append((path, body))


def test_weights_are_cast_and_split_over_files_and_tied_ones_are_written_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sync, "SHARD_BYTES", 1000)
    tied = torch.randn(20, 20)
    tensors = [("embed", tied), ("layer", torch.randn(10, 10)), ("head", tied)]
    write_weights(tmp_path, tensors, torch.bfloat16)
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["model-00001.safetensors", "model-00002.safetensors"]
    assert sum(f.stat().st_size for f in files) < 4000
    read = {name: tensor for f in files for name, tensor in load_file(f).items()}
    assert {name: tensor.dtype for name, tensor in read.items()} == dict.fromkeys(
        ["embed", "layer", "head"], torch.bfloat16
    )
    assert torch.equal(read["head"], tied.bfloat16())


def test_staged_weights_are_complete_or_absent_and_old_ones_go(tmp_path):
    sync = FileSync(tmp_path, torch.float32, "policy")
    sync.stage(lambda: [("w", torch.ones(2))], 1)

    def broken():
        yield "w", torch.ones(2)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        sync.stage(broken, 2)
    assert not (tmp_path / "2").exists()
    sync.stage(lambda: [("w", torch.ones(2))], 2)
    sync.forget(keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


def test_shared_gpu_memory_needs_weights_on_a_gpu():
    with pytest.raises(ValueError, match=r"set engine\.vllm\.sync to files"):
        IpcSync(torch.bfloat16, "policy").stage(lambda: [("w", torch.ones(2))], 1)


async def test_shared_gpu_memory_is_handed_over_in_vllms_order():
    sync = IpcSync(torch.bfloat16, "policy")
    info = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]], "ipc_handles_pickled": "…"}
    sync._staged = {3: ([], info), 4: ([], {})}
    client = Recorder()
    assert await sync.give(client, 3) == "policy"  # pyright: ignore[reportArgumentType] - a recorder
    assert client.calls == [
        "/pause",
        ("/init_weight_transfer_engine", {"init_info": {"packed": False}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {"weight_version": "step-3"}),
        "/reset_prefix_cache",
        "/resume",
    ]
    sync.forget(keep=4)
    assert list(sync._staged) == [4]
