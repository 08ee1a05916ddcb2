"""Reads what a GGUF file says about a model's tokenizer, and turns a GGUF into a Hugging Face folder.

The metadata reader and the tokenizer builder need nothing but the standard library. `convert` needs the extra `train`
and is meant to run in a process of its own: `python -m swarmtune.gguf FILE.gguf FOLDER`.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3


class NotGGUF(ValueError):
    """The bytes are not a GGUF file, or end too early."""


def read_metadata(file: BinaryIO) -> dict[str, Any]:
    """The key-value section of a GGUF file; reads no further than its end.

    Raises:
        NotGGUF: wrong magic, unknown version, or truncated.
    """
    if file.read(4) != b"GGUF":
        raise NotGGUF("the file does not start with GGUF")
    version = _scalar(file, 4)
    if version not in (2, 3):
        raise NotGGUF(f"GGUF version {version} is unknown; known: 2, 3")
    _scalar(file, 10)  # number of tensors
    return {_string(file): _value(file, _scalar(file, 4)) for _ in range(_scalar(file, 10))}


def _scalar(file: BinaryIO, kind: int) -> Any:
    layout = _SCALARS[kind]
    return struct.unpack(layout, _exactly(file, struct.calcsize(layout)))[0]


def _string(file: BinaryIO) -> str:
    return _exactly(file, _scalar(file, 10)).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, length = _scalar(file, 4), _scalar(file, 10)
        if item in _SCALARS:
            layout = f"<{length}{_SCALARS[item][1]}"
            return list(struct.unpack(layout, _exactly(file, struct.calcsize(layout))))
        return [_value(file, item) for _ in range(length)]
    if kind not in _SCALARS:
        raise NotGGUF(f"GGUF value type {kind} is unknown")
    return _scalar(file, kind)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise NotGGUF("the file ends inside its metadata")
    return data


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja of a byte-level BPE model to `folder`.

    Digits are split one by one, as GGUF's pre-tokenizer `smollm` says. The end-of-turn token is also the padding token.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    special = {i: t for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL_TOKEN}
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_of_text],
        },
        "post_processor": None,
        "decoder": bytes_of_text,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    end_of_turn = tokens[metadata["tokenizer.ggml.eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": end_of_turn,
        "pad_token": end_of_turn,
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": list(special.values()),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (fp32 safetensors), configuration and tokenizer of `gguf` to the existing `folder`.

    Raises:
        NotGGUF: the file is none.
        ImportError: the extra `train` is not installed.
    """
    with gguf.open("rb") as file:
        metadata = read_metadata(file)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    end_of_turn = metadata["tokenizer.ggml.eos_token_id"]
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end_of_turn
        config.bos_token_id = metadata["tokenizer.ggml.bos_token_id"]
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    write_tokenizer(metadata, folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
