"""Export: the weights of a checkpoint as a folder that `transformers`, `peft` and vLLM load.

    python -m swarmtune.trainer.export …/runs/0001/checkpoints/step-000010 --out DIR [--adapter] [--dtype bf16]

Reads the checkpoint and the start model's folder, and needs neither server nor training: it computes on files. What
always holds: `out` is complete or absent; it holds the weights, the start model's configuration, tokenizer, chat
template and generation settings, and `a3r_export.json`, which says where the weights come from.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

import swarmtune
from swarmtune import models
from swarmtune.config import ConfigError, LoraConfig, TrainConfig
from swarmtune.export_process import NO_SPACE, REFUSED
from swarmtune.protocol import ExportView
from swarmtune.trainer import adapter as adapters
from swarmtune.trainer import checkpoint

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ORIGIN = "a3r_export.json"
FORMAT = 1
SHARD = "5GB"
"""Largest weights file; more are split, with an index."""

_PEFT_PREFIX = "base_model.model."
_RANK = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt\Z")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Ends of names of files that hold weights, or list them: those of the start model are not taken along."""


class ExportRefused(ValueError):
    """It cannot be exported as asked; the message says why and what can be done."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and what its run says about it."""

    path: Path
    step: int
    model: str
    """As the run's configuration names it, or as it was given."""
    lora: LoraConfig | None
    dtype: Dtype
    """What the engine computed in."""
    run: Path | None
    config_sha256: str | None

    @classmethod
    def read(cls, path: Path, *, model: str | None = None) -> Source:
        """`model`: the start model, where the checkpoint is not in its run's folder any more.

        Raises:
            ExportRefused: no checkpoint of a trainer is there, or nothing says which model it is of.
        """
        if (path / "state.json").is_file() and not (path / checkpoint.STATE).is_file():
            raise ExportRefused(f"{path}: a checkpoint of the scripted engine, which has no weights")
        try:
            state = checkpoint.read(path)
        except (OSError, ValueError) as error:
            raise ExportRefused(str(error)) from error
        run = path.resolve().parent.parent
        config = _config_of(run)
        if config is None and model is None:
            raise ExportRefused(
                f"{path}: there is no config.json of a run beside it; say which model it was trained from (--model)"
            )
        lora = state["model"].get("lora")
        return cls(
            path=path,
            step=int(state["step"]),
            model=model or (config.model if config else ""),
            lora=LoraConfig.model_validate(lora) if lora else None,
            dtype=config.trainer.dtype if config else "bf16",
            run=run if config else None,
            config_sha256=config_digest(config) if config else None,
        )


def export(
    path: Path, out: Path, *, model: str | None = None, adapter: bool = False, dtype: Dtype | None = None
) -> ExportView:
    """Write the checkpoint `path` as a Hugging Face folder, or its LoRA adapter as a peft folder.

    Args:
        out: absent, or an empty folder. The same export again is found done.
        dtype: of the weights; None is what the engine computed in, so the folder holds what answered. Adapters: fp32.

    Raises:
        ExportRefused: no weights there, no adapter to export, `out` taken, or an unknown start model.
        OSError: not enough space (ENOSPC), or not writable; `out` is absent.
    """
    source = Source.read(path, model=model)
    if adapter and source.lora is None:
        raise ExportRefused(f"{path}: trained without lora, so there is no adapter; export the whole weights")
    if adapter and dtype not in (None, "fp32"):
        raise ExportRefused("adapters are written in fp32; leave --dtype away")
    kind: Dtype = "fp32" if adapter else dtype or source.dtype
    if _is_done(out, source, adapter=adapter, dtype=kind):
        return _view(out, source)
    _check_free(out)
    try:
        base = models.resolve(source.model)
    except models.ModelError as error:
        raise ExportRefused(f"the start model is needed for its tokenizer and configuration: {error}") from error
    state = read_weights(path)
    tensors = dict(adapter_weights(state)) if adapter else dict(whole_weights(state, source.lora))
    del state
    extra = sum(file.stat().st_size for file in side_files(base))
    needed = sum(t.numel() for t in tensors.values()) * DTYPES[kind].itemsize + extra + (4 << 20)

    def fill(folder: Path) -> None:
        for file in side_files(base):
            shutil.copyfile(file, folder / file.name)
        if adapter:
            assert source.lora is not None
            (folder / "config.json").unlink(missing_ok=True)  # a peft folder with one would be taken for a model
            adapters.write_adapter(folder, tensors.items(), source.lora, base=str(base))
        else:
            _write_model(folder, tensors, base, kind)
        _write_origin(folder, source, adapter=adapter, dtype=kind)

    if out.exists():
        out.rmdir()
    checkpoint.place(out, fill, needed_bytes=needed, what="the export", fix="choose a narrower dtype")
    return _view(out, source)


# -- reading


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The model's state as veRL saved it, the shards of several ranks put together; master weights, fp32.

    Raises:
        ExportRefused: a rank's file is missing.
    """
    files = {int(m[2]): (int(m[1]), file) for file in path.iterdir() if (m := _RANK.match(file.name))}
    ranks = next(iter(files.values()))[0] if files else 0
    if not files or sorted(files) != list(range(ranks)):
        raise ExportRefused(f"{path}: weights of rank(s) are missing: {ranks or 'no'} expected, {len(files)} there")
    shards = [torch.load(files[rank][1], map_location="cpu", weights_only=False) for rank in range(ranks)]
    return {name: _joined(name, [shard.pop(name) for shard in shards]) for name in list(shards[0])}


def _joined(name: str, parts: list[Any]) -> torch.Tensor:
    """One tensor of the ranks' parts; those without placements are the same on each rank."""
    placements = getattr(parts[0], "placements", None)
    local = [getattr(part, "_local_tensor", part) for part in parts]
    if placements is None or len(parts) == 1 or placements[-1].is_replicate():
        return local[0]
    if len(placements) > 1:
        raise ExportRefused(f"{name}: sharded over {len(placements)} dimensions, of which one is understood here")
    return torch.cat(local, dim=placements[0].dim)


def whole_weights(state: dict[str, torch.Tensor], lora: LoraConfig | None) -> Iterator[tuple[str, torch.Tensor]]:
    """By Hugging Face name, adapters merged: W + alpha / rank · B A."""
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")
        if lora is not None and name.endswith(".base_layer.weight"):
            place = name.removesuffix(".base_layer.weight")
            down, up = state[f"{place}.lora_A.default.weight"], state[f"{place}.lora_B.default.weight"]
            tensor = tensor + up @ down * (lora.alpha / lora.rank)
        yield plain, tensor


def adapter_weights(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter by the names that peft gives it in a folder."""
    for name, tensor in state.items():
        if ".lora_" in name:
            yield name.replace(".default.", "."), tensor


def side_files(base: Path) -> list[Path]:
    """Files of a model folder that belong to a model whatever its weights: configuration, tokenizer, templates."""
    return sorted(
        file
        for file in base.iterdir()
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS) and file.name != _NOTE
    )


_NOTE = "a3r_model.json"
"""The catalogue's list of a model's files and sizes, which do not fit the export's."""


# -- writing


def _write_model(folder: Path, tensors: dict[str, torch.Tensor], base: Path, dtype: Dtype) -> None:
    from huggingface_hub import save_torch_state_dict

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if config.get("tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    wanted = DTYPES[dtype]
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(wanted)
        tensors[name] = tensors[name].contiguous()
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD)
    name = str(wanted).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": name}, indent=2) + "\n", encoding="utf-8")


def _write_origin(folder: Path, source: Source, *, adapter: bool, dtype: Dtype) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    made = {"swarmtune": swarmtune.__version__, "at": time.time(), "files": files}
    origin = _origin(source, adapter=adapter, dtype=dtype) | made
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    for name in files:  # safetensors lets nobody but the owner read what it writes; the umask is to decide
        shutil.copymode(folder / ORIGIN, folder / name)


def _origin(source: Source, *, adapter: bool, dtype: Dtype) -> dict[str, Any]:
    """Where weights come from: equal for equal exports."""
    return {
        "format": FORMAT,
        "kind": "adapter" if adapter else "model",
        "run": str(source.run) if source.run else None,
        "step": source.step,
        "model": source.model,
        "lora": source.lora.model_dump() if source.lora else None,
        "dtype": dtype,
        "config_sha256": source.config_sha256,
    }


def _is_done(out: Path, source: Source, *, adapter: bool, dtype: Dtype) -> bool:
    """Whether this very export is there: a request was repeated because its answer was lost."""
    try:
        there = json.loads((out / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(there.get(key) == value for key, value in _origin(source, adapter=adapter, dtype=dtype).items())


def _view(out: Path, source: Source) -> ExportView:
    return ExportView(path=str(out), step=source.step, bytes=sum(f.stat().st_size for f in out.iterdir()))


def config_digest(config: TrainConfig) -> str:
    """SHA-256 of a resolved configuration: of its JSON with sorted keys and no spaces."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _config_of(run: Path) -> TrainConfig | None:
    try:
        return TrainConfig.from_dict(json.loads((run / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise ExportRefused(f"{run / 'config.json'}: {error}") from error


def _check_free(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ExportRefused(f"{out}: is there already; name a folder that is not, or remove that one")


# -- as a process


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the weights of a checkpoint as a Hugging Face folder.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="the start model, where the checkpoint is not in its run's folder")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--parent", type=int, help="pid to end with")
    options = parser.parse_args()
    if options.parent is not None:
        from swarmtune.engines.host import die_with_parent

        die_with_parent(options.parent)
    try:
        done = export(
            options.checkpoint, options.out, model=options.model, adapter=options.adapter, dtype=options.dtype
        )
    except ExportRefused as error:
        _end(REFUSED, str(error))
    except OSError as error:
        _end(NO_SPACE if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} else 1, str(error))
    print(done.model_dump_json())


def _end(status: int, sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
