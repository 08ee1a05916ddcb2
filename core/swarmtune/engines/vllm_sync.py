"""How one set of weights gets into vLLM servers: staged once by the trainer, given to each server when it is ready.

`stage` blocks and belongs on the torch thread. `give` may come again for the same weights at any time, as when a server
was started anew, so what was staged stays until the next weights are in place. After `give` the server answers with
exactly the staged weights, holds nothing computed with others, and says so: its label is the version's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file

from swarmtune.backend import RequestRefused
from swarmtune.engines.engine import NamedTensors, SaveAdapter
from swarmtune.engines.vllm_client import Unreachable, VllmClient

SHARD_BYTES = 4 << 30
"""Of one weight file: as much is held in memory while it is written."""
_CACHE_TRIES = 100
_CACHE_WAIT_S = 0.1


def label_of(version: int) -> str:
    """What a server with these weights calls them."""
    return f"step-{version}"


class WeightSync(Protocol):
    labels: bool
    """Whether servers label their answers with `label_of(version)`."""

    async def give(self, client: VllmClient, version: int) -> str:
        """Bring the staged weights into one server; returns the model name to ask for.

        Raises:
            Unreachable: the server went away meanwhile.
            RequestRefused: it will not take them.
        """
        ...

    def forget(self, keep: int | None) -> None:
        """Drop what was staged for versions other than `keep`. Idempotent."""
        ...


@dataclass
class FileSync:
    """All weights as safetensors, read by vLLM's `reload_weights`."""

    folder: Path
    dtype: torch.dtype
    model_name: str
    labels: bool = True

    def stage(self, tensors: NamedTensors, version: int) -> None:
        """Write them to a folder of their own: complete or absent.

        Raises:
            OSError
        """
        partial = self.folder / f".partial-{version}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_weights(partial, tensors(), self.dtype)
        done = self._of(version)
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)

    async def give(self, client: VllmClient, version: int) -> str:
        await client.pause()
        await client.reload_weights(str(self._of(version)))
        await reset_cache(client)
        await client.label_weights(label_of(version))
        await client.resume()
        return self.model_name

    def forget(self, keep: int | None) -> None:
        forget_folders(self.folder, keep)

    def _of(self, version: int) -> Path:
        return self.folder / str(version)


class AdapterSync:
    """The LoRA adapter alone; the base model's weights in the server stay as they are.

    Each version has a name of its own, so no keys and values computed with another one can be reused, other adapters on
    the same server are not disturbed, and a request under a name can only be answered by that version.
    """

    labels = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = secrets.token_hex(4)
        """Servers may be shared; adapters of two runs must not share a name."""
        self._given: WeakKeyDictionary[VllmClient, str] = WeakKeyDictionary()

    def stage(self, save: SaveAdapter, version: int) -> None:
        folder = self._of(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save(folder)

    async def give(self, client: VllmClient, version: int) -> str:
        name = f"{self._run}-{label_of(version)}"
        before = self._given.pop(client, None)
        if before is not None:
            with contextlib.suppress(RequestRefused):
                await client.unload_adapter(before)
        await client.load_adapter(name, str(self._of(version)))
        self._given[client] = name
        return name

    def forget(self, keep: int | None) -> None:
        forget_folders(self._folder, keep)

    def _of(self, version: int) -> Path:
        return self._folder / str(version)


class IpcSync:
    """All weights through CUDA memory that trainer and servers on one machine share (vLLM's transfer engine `ipc`).

    A copy in the servers' dtype stays on the trainer's GPU until the next weights are in place, so that a server
    started anew can have it, too.
    """

    labels = True

    def __init__(self, dtype: torch.dtype, model_name: str) -> None:
        self._dtype = dtype
        self._model_name = model_name
        self._staged: dict[int, tuple[list[torch.Tensor], dict[str, Any]]] = {}
        """Version → (what must stay alive, vLLM's update_info)."""

    def stage(self, tensors: NamedTensors, version: int) -> None:
        """Copy each weight on its GPU and export a handle of it.

        Raises:
            ValueError: a weight is not on a CUDA device.
        """
        copies: list[torch.Tensor] = []
        info: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": []}
        handles = []
        for name, tensor in tensors():
            if not tensor.is_cuda:
                raise ValueError(
                    "engine.vllm.sync ipc shares GPU memory, and the trainer's weights are on the "
                    f"{tensor.device.type}; set engine.vllm.sync to files"
                )
            copy = tensor.detach().to(self._dtype, copy=True).contiguous()
            copies.append(copy)
            handles.append(cuda_handle(copy))
            info["names"].append(name)
            info["dtype_names"].append(str(copy.dtype).removeprefix("torch."))
            info["shapes"].append(list(copy.shape))
        info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        torch.cuda.synchronize()
        self._staged[version] = (copies, info)

    async def give(self, client: VllmClient, version: int) -> str:
        _, info = self._staged[version]
        await client.pause()
        await client.call("/init_weight_transfer_engine", {"init_info": {"packed": False}})
        await client.call("/start_weight_update")
        await client.call("/update_weights", {"update_info": info})
        await client.call("/finish_weight_update", {"weight_version": label_of(version)})
        await reset_cache(client)
        await client.resume()
        return self._model_name

    def forget(self, keep: int | None) -> None:
        for version in [v for v in self._staged if v != keep]:
            del self._staged[version]


def cuda_handle(tensor: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """{GPU's UUID: arguments of torch's rebuild_cuda_tensor}, as vLLM's ipc engine wants them."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): arguments}


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Write tensors, cast, as files of about SHARD_BYTES."""
    shard: dict[str, torch.Tensor] = {}
    held, number = 0, 1
    for name, tensor in tensors:
        # The tensor may be the live one, and two names may share its memory: a file holds copies.
        copied = shard[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        held += copied.nbytes
        if held >= SHARD_BYTES:
            save_file(shard, folder / f"model-{number:05}.safetensors")
            shard, held, number = {}, 0, number + 1
    if shard:
        save_file(shard, folder / f"model-{number:05}.safetensors")


def forget_folders(parent: Path, keep: int | None) -> None:
    for folder in parent.glob("[0-9]*"):
        if folder.name != str(keep):
            shutil.rmtree(folder, ignore_errors=True)


async def reset_cache(client: VllmClient) -> None:
    """Have the server forget keys and values of earlier weights, as soon as what was aborted has let go of them."""
    for _ in range(_CACHE_TRIES - 1):
        with contextlib.suppress(Unreachable):
            await client.reset_prefix_cache()
            return
        await asyncio.sleep(_CACHE_WAIT_S)
    await client.reset_prefix_cache()
