"""Keys and values of the running requests, in one growing buffer per layer, plus prefixes kept for later prompts.

`RowCache` is the cache a transformers model writes into. Its rows 0..n-1 are the running requests without gaps; row r
holds its tokens at columns 0..length-1, so joining writes a new last row, leaving moves the last row into the gap, and
a decode step writes one slot per row and hands attention a view: nothing is copied per step. `PrefixStore` keeps the
columns of finished requests, so that the next turn of a conversation or another repeat of a prompt only computes what
is new. Neither knows about sampling or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

TokenArray = np.ndarray[Any, np.dtype[np.int64]]

BLOCK = 8
"""Shortest beginning that is kept or looked for."""
_FIRST_ROWS = 8
_FIRST_COLUMNS = 128


@dataclass(slots=True)
class Columns:
    """Keys and values of one sequence's first tokens, one tensor per layer: (T, heads * head_dim)."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.keys) + sum(t.nbytes for t in self.values)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where one forward pass writes and what it may look at."""

    first_row: int
    rows: int
    width: int
    """Attention sees columns 0..width-1 of these rows."""
    slots: torch.Tensor
    """(rows * new tokens,): flat slot of each new token; padding goes to the spare row."""


class RowCache(Cache):
    """One buffer of keys and one of values per layer, each (rows + 1, columns, heads * head_dim).

    The row after the last is never read: padding is written there. Buffers start as zeros because attention multiplies
    masked columns by 0, which does not remove a NaN.
    """

    def __init__(self, max_rows: int, max_columns: int) -> None:
        super().__init__(layers=[])
        self._max_rows, self._max_columns = max_rows, max_columns
        self.rows, self.columns = min(_FIRST_ROWS, max_rows), min(_FIRST_COLUMNS, max_columns)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._plan: WritePlan | None = None

    def reserve(self, rows: int, columns: int) -> None:
        """Make room; doubles, so that the copying is paid once per token at most."""
        if rows <= self.rows and columns <= self.columns:
            return
        old_rows, old_columns = self.rows, self.columns
        while self.rows < rows:
            self.rows = min(self.rows * 2, self._max_rows)
        while self.columns < columns:
            self.columns = min(self.columns * 2, self._max_columns)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                new = old.new_zeros(self.rows + 1, self.columns, old.shape[-1])
                new[:old_rows, :old_columns] = old[:old_rows]
                buffers[layer] = new

    def plan(self, plan: WritePlan) -> None:
        """Set what the next forward pass does; call after `reserve`."""
        self._plan = plan

    def slot(self, row: int, column: int) -> int:
        """Flat index of a token's place, as WritePlan.slots wants it."""
        return row * self.columns + column

    @property
    def spare_slot(self) -> int:
        return self.rows * self.columns

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' (rows, heads, T, head_dim) and return views of all columns: (rows, heads, width, …)."""
        plan = self._plan
        assert plan is not None, "plan() comes before the forward pass"
        return (
            self._write(self._keys, key_states, layer_idx, plan),
            self._write(self._values, value_states, layer_idx, plan),
        )

    def _write(self, buffers: list[torch.Tensor], new: torch.Tensor, layer_idx: int, plan: WritePlan) -> torch.Tensor:
        rows, heads, length, head_dim = new.shape
        if layer_idx == len(buffers):
            buffers.append(new.new_zeros(self.rows + 1, self.columns, heads * head_dim))
        buffer = buffers[layer_idx]
        flat = new.transpose(1, 2).reshape(rows * length, heads * head_dim)
        buffer.view(-1, heads * head_dim).index_copy_(0, plan.slots, flat)
        seen = buffer[plan.first_row : plan.first_row + plan.rows, : plan.width]
        return seen.view(plan.rows, plan.width, heads, head_dim).transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._plan.width if self._plan else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return (self._plan.width if self._plan else query_length), 0

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` columns of `source`."""
        for buffers in (self._keys, self._values):
            for buffer in buffers:
                buffer[target, :length] = buffer[source, :length]

    def take(self, row: int, length: int) -> Columns:
        """A copy of the first `length` columns of `row`."""
        return Columns([b[row, :length].clone() for b in self._keys], [b[row, :length].clone() for b in self._values])

    def put(self, row: int, columns: Columns, length: int) -> None:
        """Fill the first `length` columns of `row`."""
        for buffers, stored in ((self._keys, columns.keys), (self._values, columns.values)):
            for buffer, part in zip(buffers, stored, strict=True):
                buffer[row, :length] = part[:length]

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._keys, self._values, self._plan = [], [], None
        self.rows, self.columns = min(_FIRST_ROWS, self._max_rows), min(_FIRST_COLUMNS, self._max_columns)


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: TokenArray
    columns: Columns
    blocks: list[int]


class PrefixStore:
    """Columns of finished sequences; the least recently used leave when `max_bytes` is reached.

    Found by hashes of their beginnings in steps of BLOCK tokens, so a look-up costs the prompt's length, not the
    store's size. Hashes only propose: the tokens are compared.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_block: dict[int, int] = {}
        self._next_id = 0

    def add(self, tokens: TokenArray, columns: Columns) -> None:
        """Keep `columns` of `tokens`; an entry that is only their beginning goes."""
        blocks = _block_hashes(tokens)
        if not blocks or columns.nbytes > self._max_bytes:
            return
        if (found := self._find(blocks)) is not None:
            held = self._entries[found].tokens
            if common_prefix(held, tokens) == len(held):
                self._drop(found)
        self._next_id += 1
        self._entries[self._next_id] = _Entry(tokens, columns, blocks)
        self._by_block.update(dict.fromkeys(blocks, self._next_id))
        self._bytes += columns.nbytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def longest(self, tokens: TokenArray) -> tuple[int, Columns | None]:
        """Length of a long stored beginning of `tokens` (the longest but for less than BLOCK), and where it is."""
        found = self._find(_block_hashes(tokens))
        if found is None:
            return 0, None
        self._entries.move_to_end(found)
        entry = self._entries[found]
        return common_prefix(entry.tokens, tokens), entry.columns

    def clear(self) -> None:
        self._entries.clear()
        self._by_block.clear()
        self._bytes = 0

    def _find(self, blocks: list[int]) -> int | None:
        return next((self._by_block[block] for block in reversed(blocks) if block in self._by_block), None)

    def _drop(self, entry_id: int) -> None:
        entry = self._entries.pop(entry_id)
        self._bytes -= entry.columns.nbytes
        for block in entry.blocks:
            if self._by_block.get(block) == entry_id:
                del self._by_block[block]


def _block_hashes(tokens: TokenArray) -> list[int]:
    """Hash of the first BLOCK tokens, of the first 2 BLOCK tokens, …"""
    hashes, running = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        running = hash((running, tokens[end - BLOCK : end].tobytes()))
        hashes.append(running)
    return hashes


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
