"""Encoding piece by piece, remembering what was encoded before: the same ids as the tokenizer gives for the whole text.

A byte-level tokenizer cuts its text at special tokens, and then into words by a regular expression that never joins
what stands on the two sides of a single space. So a text is encoded as pieces between special tokens, which are
remembered (system prompts and tools come again and again), and a new piece from remembered words. `piecewise` is None
for a tokenizer of which that is not known to hold.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer as FastTokenizer

PIECES_CHARACTERS = 4_000_000
"""Text of the pieces that are remembered: about 8 MB with their ids."""
WORDS = 50_000
"""Words that are remembered: about 10 MB."""
LONGEST_WORD = 64
LEARNED_SHARE = 32
"""Of this many words of a piece, one that is new is learned: to encode it alone costs as much as several in a row."""

_SINGLE_SPACE = re.compile(r"(?<=\S) (?=\S)")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = frozenset({_GPT2, _CL100K % "", _CL100K % "{1,3}"})
"""Word patterns (GPT-2; Qwen 2 and 3; Llama 3) in which no word goes on beyond a single space between two others."""
_WORDS_STAY = (("Isolated", False), ("Removed", True))
"""Behaviours of a split that leave every word in the text."""
_NORMALIZERS = frozenset({"NFC"})


class PieceEncoder:
    def __init__(self, fast: FastTokenizer, marks: dict[str, int]) -> None:
        """`marks`: every added token's text and id."""
        self._fast = fast
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split if marks else None
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._heads: dict[str, list[int]] = {}
        """Word at the beginning of a piece → its ids."""
        self._words: dict[str, list[int]] = {}
        """Word after a space → ids of both."""

    def encode(self, text: str) -> list[int]:
        return self.encode_cut(text, ())[0]

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids of `text`, and for each cut (a character, ascending) the index of the first token at or after it."""
        ids: list[int] = []
        ends: list[int] = []
        waiting = iter((*cuts, len(text) + 1))
        cut = next(waiting)
        at = 0
        for piece in self._split(text) if self._split is not None else (text,):
            stop = at + len(piece)
            while cut <= at:
                ends.append(len(ids))
                cut = next(waiting)
            while cut < stop:
                ends.append(len(ids) + self._tokens_before(piece, cut - at))
                cut = next(waiting)
            if (mark := self._marks.get(piece)) is not None:
                ids.append(mark)
            elif piece:
                ids.extend(self._piece(piece))
            at = stop
        ends.extend([len(ids)] * (len(cuts) - len(ends)))
        return ids, ends

    def _tokens_before(self, piece: str, character: int) -> int:
        """How many of the piece's tokens begin before a character of it."""
        if piece in self._marks:
            return 1
        offsets = self._fast.encode(piece, add_special_tokens=False).offsets
        return sum(start < character for start, _ in offsets)

    def _piece(self, piece: str) -> array[int]:
        found = self._pieces.get(piece)
        if found is not None:
            self._pieces.move_to_end(piece)
            return found
        ids = self._pieces[piece] = array("i", self._from_words(piece))
        self._characters += len(piece)
        while self._characters > PIECES_CHARACTERS:
            self._characters -= len(self._pieces.popitem(last=False)[0])
        return ids

    def _from_words(self, piece: str) -> list[int]:
        head, *words = _SINGLE_SPACE.split(piece)
        fresh = [word for word in words if word not in self._words]
        if fresh:
            self._learn(fresh, 1 + len(words) // LEARNED_SHARE)
            if len(fresh) * 2 > len(words):
                return self._whole(piece)
        out = [*self._head(head)]
        known, run = self._words.get, []
        for word in words:
            ids = known(word)
            if ids is None:
                run.append(word)
                continue
            if run:
                out += self._whole(" " + " ".join(run))
                run = []
            out += ids
        return out + self._whole(" " + " ".join(run)) if run else out

    def _head(self, head: str) -> list[int]:
        found = self._heads.get(head)
        if found is None:
            found = self._whole(head)
            if len(head) <= LONGEST_WORD and len(self._heads) < WORDS:
                self._heads[head] = found
        return found

    def _learn(self, fresh: Sequence[str], count: int) -> None:
        if len(self._words) + count > WORDS:
            self._words.clear()
            self._heads.clear()
        for word in fresh[:count]:
            if len(word) <= LONGEST_WORD:
                self._words[word] = self._whole(f" {word}")

    def _whole(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids


def piecewise(fast: FastTokenizer) -> PieceEncoder | None:
    """An encoder that gives the ids that `fast` gives; None where that is not certain."""
    added = fast.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added.values()):
        return None
    described = orjson.loads(fast.to_str())
    if (described.get("truncation") or described.get("padding")) or described["model"].get("type") != "BPE":
        return None
    if any(step["type"] not in _NORMALIZERS for step in _steps(described.get("normalizer"), "normalizers")):
        return None
    steps = _steps(described.get("pre_tokenizer"), "pretokenizers")
    if not any(map(_cuts_words, steps)) or not all(_cuts_words(s) or _cuts_further(s) for s in steps):
        return None
    return PieceEncoder(fast, {token.content: i for i, token in added.items()})


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for one in part[inner] for step in _steps(one, inner)] if part["type"] == "Sequence" else [part]


def _cuts_words(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex")) and not step["add_prefix_space"]
    if step["type"] == "Split":
        pattern = step["pattern"].get("Regex")
        return pattern in _PATTERNS and (step["behavior"], step["invert"]) in _WORDS_STAY
    return False


def _cuts_further(step: dict[str, Any]) -> bool:
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"])
