"""Answers that obey a grammar: which tokens may come next, per request. The library `llguidance` does the work.

A grammar is its Lark text, in which `%json {…}` stands for a JSON schema. What a constraint allows is cut out of the
distribution before a token is drawn, as top_p cuts; the logprob that is reported stays that of the whole distribution.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmtune.backend import RequestRefused

KEPT_GRAMMARS = 64
"""Compiled grammars that are remembered: agents send the same ones again and again."""


def can_constrain() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, end_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids

    def allowed(self, vocabulary: int, end_ids: Iterable[int]) -> torch.Tensor:
        """(V,) bool: the tokens that may come next; `end_ids` among them where the answer may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.zeros(vocabulary, dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[:vocabulary]
        mask[: len(known)] = known
        ends = list(end_ids)
        mask[ends] = bool(mask[list(self._end_ids)].any()) or not mask.any()
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """Go on past a token that was allowed; past an end token nothing more is asked."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Grammars:
    """Compiles grammars for one model's tokens.

    Args:
        tokenizer_file: tokenizer.json.
        end_ids: tokens that end an answer by the model's own configuration; at least one.
    """

    def __init__(self, tokenizer_file: Path, end_ids: Iterable[int]) -> None:
        self._file = tokenizer_file
        self._end_ids = tuple(sorted(end_ids))
        self._tokens: Any = None
        self._compiled = lru_cache(maxsize=KEPT_GRAMMARS)(self._compile)

    def start(self, grammar: str) -> Constraint:
        """Raises:
        RequestRefused: the grammar cannot be compiled, or the library is not there.
        """
        return Constraint(self._compiled(grammar).deep_copy(), self._end_ids)

    def _compile(self, grammar: str) -> Any:
        if not can_constrain():
            raise RequestRefused("answers cannot be constrained here; pip install llguidance where the engine runs")
        from llguidance import LLMatcher, LLTokenizer

        if self._tokens is None:
            self._tokens = LLTokenizer(tokenizer_text(self._file), eos_token=list(self._end_ids))
        matcher = LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise RequestRefused(f"the schema cannot be enforced: {matcher.get_error().splitlines()[0]}")
        return matcher


def tokenizer_text(file: Path) -> str:
    """tokenizer.json with the one decoder that a byte-level vocabulary has.

    Files converted from other formats may list further decoders, by which the library takes the vocabulary for another
    kind.
    """
    settings = json.loads(file.read_text())
    if "ByteLevel" in json.dumps(settings.get("pre_tokenizer")):
        settings["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return json.dumps(settings)
