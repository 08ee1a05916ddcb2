"""Where the tokens of packed rows lie, and log-probabilities of chosen tokens: plain torch, no veRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 24
"""Logits are brought to fp32 in pieces of this many elements (64 MB)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of R rows lie in a padded batch of B sequences of length L."""

    input_ids: torch.Tensor
    """(B, L), zeros where padded."""
    slots: torch.Tensor
    """(total tokens,) flat index into (B · L) of each row's tokens, row after row."""
    position_ids: torch.Tensor | None
    """(B, L); None means 0…L-1, as every model assumes by itself."""
    attention_mask: torch.Tensor | None
    """(B, 1, L, L), True where attention is allowed; None means causal."""


def layout(tokens: torch.Tensor, offsets: torch.Tensor, bundle: list[int], shared: list[int]) -> Layout:
    """Lay out rows; rows of one bundle share their first `shared` tokens and become one sequence.

    Args:
        tokens: (total tokens,) ids, row after row.
        offsets: (R + 1,) where each row begins.
        bundle: per row; equal neighbours belong together.
        shared: per row, tokens it shares with its bundle; the same for all rows of one.
    """
    bounds = offsets.tolist()
    sequences: list[list[int]] = []
    for row, name in enumerate(bundle):
        if row and name == bundle[row - 1]:
            sequences[-1].append(row)
        else:
            sequences.append([row])
    lengths = [shared[rows[0]] + sum(bounds[r + 1] - bounds[r] - shared[r] for r in rows) for rows in sequences]
    batch, width = len(sequences), max(lengths)
    input_ids = torch.zeros(batch, width, dtype=torch.long)
    position_ids = torch.zeros(batch, width, dtype=torch.long)
    segment = torch.full((batch, width), -1, dtype=torch.long)
    slots = torch.empty(bounds[-1], dtype=torch.long)
    for b, rows in enumerate(sequences):
        prefix, cursor = shared[rows[0]], shared[rows[0]]
        first = bounds[rows[0]]
        input_ids[b, :prefix] = tokens[first : first + prefix]
        position_ids[b, :prefix] = torch.arange(prefix)
        segment[b, :prefix] = 0
        for index, row in enumerate(rows):
            begin, end = bounds[row] + prefix, bounds[row + 1]
            span = slice(cursor, cursor + end - begin)
            input_ids[b, span] = tokens[begin:end]
            position_ids[b, span] = torch.arange(prefix, prefix + end - begin)
            segment[b, span] = index + 1
            slots[bounds[row] : begin] = b * width + torch.arange(prefix)
            slots[begin:end] = b * width + torch.arange(cursor, cursor + end - begin)
            cursor += end - begin
    if all(len(rows) == 1 for rows in sequences):
        return Layout(input_ids, slots, None, None)
    return Layout(input_ids, slots, position_ids, _block_mask(segment))


def _block_mask(segment: torch.Tensor) -> torch.Tensor:
    """(B, L) segment numbers → (B, 1, L, L): causal within a segment, and every segment sees segment 0.

    Padding (-1) sees only padding before it, so that no softmax is over nothing.
    """
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
    return (((key == query) | ((key == 0) & (query >= 0))) & causal)[:, None]


class _TokenLogprobs(torch.autograd.Function):
    """log p and entropy of given tokens under softmax(logits / temperature), computed in fp32 piece by piece.

    Keeps the logits in their own dtype for the backward pass and nothing else of vocabulary size.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, V), (N,), (N,) → log p (N,), entropy (N,) in fp32. The entropy carries no gradient."""
        logprobs, norms, entropy = (torch.empty(len(labels)) for _ in range(3))
        for part in _pieces(logits):
            scaled = logits[part].float() / temperature[part, None]
            norm = torch.logsumexp(scaled, dim=-1)
            norms[part] = norm
            logp = scaled.sub_(norm[:, None])
            logprobs[part] = logp.gather(1, labels[part, None])[:, 0]
            entropy[part] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(logits, labels, temperature, norms)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, temperature, norms = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for part in _pieces(logits):
            inverse = 1.0 / temperature[part]
            scale = (grads[0][part] * inverse)[:, None]
            grad = (logits[part].float() * inverse[:, None]).sub_(norms[part, None]).exp_().mul_(-scale)
            grad.scatter_add_(1, labels[part, None], scale)
            grad_logits[part] = grad
        return grad_logits, None, None


def _pieces(logits: torch.Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def sum_of_squares(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(N, V), (N,) → (N,): the sum of squared probabilities of softmax(logits / temperature), without gradient."""
    squares = torch.empty(len(logits))
    with torch.no_grad():
        for part in _pieces(logits):
            squares[part] = torch.softmax(logits[part].float() / temperature[part, None], dim=-1).square().sum(-1)
    return squares


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor, *, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of `labels` and the entropy, (N,) each, of softmax(logits / temperature); logits (N, V)."""
    if not entropy_grad:
        return _TokenLogprobs.apply(logits, labels, temperature)  # type: ignore[return-value]
    logp = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
