"""A LoRA adapter as the files that PEFT and vLLM load: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from swarmtune.config import LoraConfig

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def named_adapter(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's tensors by PEFT's names, fp32, of a module that PEFT has wrapped.

    Every rank must take every tensor: gathering one needs them all. A tensor may be the live one: write to none.
    """
    for name, value in module.state_dict().items():
        if ".lora_" in name:
            whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value  # pyright: ignore[reportAttributeAccessIssue] - a DTensor
            yield name.replace(".default.", ".").replace("_fsdp_wrapped_module.", ""), whole


def write_adapter(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], lora: LoraConfig, *, base: str) -> None:
    """Write an adapter into an existing folder.

    Args:
        tensors: as `named_adapter` gives them.
        base: name or folder of the base model, for a reader; nothing is loaded from there.

    Raises:
        OSError
    """
    from safetensors.torch import save_file

    copies = {name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous() for name, tensor in tensors}
    save_file(copies, folder / WEIGHTS)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in copies}),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=1))
