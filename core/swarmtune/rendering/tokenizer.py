"""A model's tokenizer, from its `tokenizer.json` alone: no transformers, no torch, no network."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as FastTokenizer

from swarmtune.rendering.pieces import piecewise

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that are part of what an answer says, even where a tokenizer calls them special."""


@dataclass(frozen=True, slots=True)
class Encoded:
    token_ids: list[int]
    starts: list[int]
    """Index of each token's first character in the text."""
    ends: list[int]
    """Index after each token's last character."""

    def token_at(self, character: int) -> int:
        """Index of the first token that begins at or after a character."""
        return bisect_left(self.starts, character)


class Tokenizer:
    """Text ↔ token ids."""

    def __init__(self, fast: FastTokenizer, config: dict[str, Any] | None = None) -> None:
        self._fast = fast
        self._pieces = piecewise(fast)
        added = fast.get_added_tokens_decoder()
        self._hidden = {i for i, token in added.items() if token.special and token.content not in MARKERS}
        self.special_texts = {token.content: i for i, token in added.items() if token.special}
        """Text of each special token → its id."""
        self.named = _named_tokens(config or {})
        """Special tokens by role, as chat templates use them: bos_token, eos_token, …"""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a Hugging Face model folder.

        Raises:
            FileNotFoundError: the folder has no tokenizer.json.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder}: no tokenizer.json; save the model's fast tokenizer there "
                "(AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        return cls(FastTokenizer.from_file(str(path)), read_json(folder / "tokenizer_config.json"))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: special tokens in it count, none are added."""
        return (
            self._fast.encode(text, add_special_tokens=False).ids if self._pieces is None else self._pieces.encode(text)
        )

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids of `text`, and for each cut (a character, ascending) the first token at or after it."""
        if self._pieces is not None:
            return self._pieces.encode_cut(text, cuts)
        encoded = self.encode_with_offsets(text)
        return encoded.token_ids, [encoded.token_at(cut) for cut in cuts]

    def encode_with_offsets(self, text: str) -> Encoded:
        encoding = self._fast.encode(text, add_special_tokens=False)
        return Encoded(encoding.ids, [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets])

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `token_ids`; special tokens are left out unless asked for."""
        ids = token_ids if special else [i for i in token_ids if i not in self._hidden]
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def id_of(self, text: str) -> int | None:
        return self._fast.token_to_id(text)

    def stream(self) -> TextStream:
        return TextStream(self)


class TextStream:
    """Text of an answer as its tokens arrive.

    A character may be spread over several tokens, and a token may say different text after another one. So text is
    taken from a window that begins one emission back, and is held while the window ends in an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._said = 0
        """How many of the ids in the window are already emitted."""

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        return self._emit(hold=True)

    def finish(self) -> str:
        return self._emit(hold=False)

    def _emit(self, *, hold: bool) -> str:
        said = self._tokenizer.decode(self._ids[: self._said])
        text = self._tokenizer.decode(self._ids)
        if hold and (text.endswith("\ufffd") or len(text) <= len(said)):
            return ""
        self._ids = self._ids[self._said :]
        self._said = len(self._ids)
        return text[len(said) :]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no such file."""
    return orjson.loads(path.read_bytes()) if path.is_file() else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named
