"""One token per row from next-token logits. Plain functions on tensors; knows nothing of requests or caches.

Each row is drawn by inverse transform from one uniform number of its own, so a row's token depends on its logits, its
parameters and its number alone, and a row costs one pass over the vocabulary. Only rows that cut the distribution
(top_p, top_k) look at a sorted part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarmtune.types import SamplingParams

_CANDIDATES = 128


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the rows of one batch, prepared once per change of membership."""

    temperature_R: torch.Tensor | None
    """(R, 1); None when every row has 1. Greedy rows count as 1, as types.GenerateChunk.logprobs says."""
    greedy: list[int]
    restricted: list[int]
    """Rows with a top_p or top_k that cuts something off."""
    top_p_K: torch.Tensor
    """(K, 1): of the restricted rows."""
    top_k_K: torch.Tensor
    """(K, 1): of the restricted rows, 0 replaced by the vocabulary's size."""
    top_logprobs: int
    """Most alternatives any row wants."""

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocabulary: int) -> RowParams:
        temperatures = [p.temperature or 1.0 for p in rows]
        restricted = [i for i, p in enumerate(rows) if p.temperature and (p.top_p < 1 or 0 < p.top_k < vocabulary)]
        return cls(
            temperature_R=None if set(temperatures) <= {1.0} else torch.tensor(temperatures).unsqueeze(1),
            greedy=[i for i, p in enumerate(rows) if not p.temperature],
            restricted=restricted,
            top_p_K=torch.tensor([rows[i].top_p for i in restricted]).unsqueeze(1),
            top_k_K=torch.tensor([rows[i].top_k or vocabulary for i in restricted]).unsqueeze(1),
            top_logprobs=max((p.top_logprobs for p in rows), default=0),
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, one entry per row."""

    tokens: list[int]
    logprobs: list[float]
    """log softmax(logits / temperature) of the token, before top_p and top_k; NaN where the logits were not finite."""
    top_ids: list[list[int]] | None
    """(R, n) most likely tokens, most likely first, when any row asked."""
    top_logprobs: list[list[float]] | None


def sample(logits_R_V: torch.Tensor, params: RowParams, uniforms: Sequence[float]) -> Sampled:
    """Draw one token per row; `uniforms` are the rows' numbers in [0, 1)."""
    scaled = logits_R_V.float()
    if params.temperature_R is not None:
        scaled = scaled / params.temperature_R.to(scaled.device)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    """(R, V): probabilities up to the row's factor, the largest is 1."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    uniform = torch.tensor(uniforms, device=weights.device).unsqueeze(1)
    tokens = _invert(cumulative, uniform)
    if params.greedy:
        tokens[params.greedy] = weights[params.greedy].argmax(-1, keepdim=True)
    if params.restricted:
        rows = torch.tensor(params.restricted, device=weights.device)
        tokens[rows] = _draw_restricted(weights[rows], total[rows], params, uniform[rows])
    log_total = total.log()
    logprobs = weights.gather(1, tokens).log_() - log_total
    top_ids = top_logprobs = None
    if params.top_logprobs:
        top = weights.topk(min(params.top_logprobs, weights.shape[1]), dim=-1)
        top_ids, top_logprobs = top.indices.tolist(), (top.values.log() - log_total).tolist()
    return Sampled(tokens[:, 0].tolist(), logprobs[:, 0].tolist(), top_ids, top_logprobs)


def sample_allowed(
    logits_V: torch.Tensor, allowed_V: torch.Tensor, params: RowParams, uniform: float
) -> tuple[int, float]:
    """One row's token from the allowed ones, and its logprob among all. `params` are of this row alone.

    Where top_p and top_k apply, they cut what is allowed.
    """
    cut_V = logits_V.float().masked_fill(~allowed_V, -torch.inf)
    token = sample(cut_V.unsqueeze(0), replace(params, top_logprobs=0), [uniform]).tokens[0]
    scaled_V = logits_V.float()
    if params.temperature_R is not None:
        scaled_V = scaled_V / params.temperature_R[0].to(scaled_V.device)
    return token, float(scaled_V[token] - scaled_V.logsumexp(-1))


def _invert(cumulative_R_V: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """(R, 1): the first index whose cumulative weight exceeds the drawn share; never one of weight zero."""
    total = cumulative_R_V[:, -1:]
    target = torch.minimum(uniform_R * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative_R_V, target, right=True)
    return index.clamp_(max=cumulative_R_V.shape[1] - 1)


def _draw_restricted(
    weights_K_V: torch.Tensor, total_K: torch.Tensor, params: RowParams, uniform_K: torch.Tensor
) -> torch.Tensor:
    """Draw from the top_k most likely tokens, of which the smallest set with mass top_p is kept.

    Looks at the most likely tokens only, and at more of them while some row's nucleus reaches beyond.
    """
    top_p, top_k = params.top_p_K.to(weights_K_V.device), params.top_k_K.to(weights_K_V.device)
    vocabulary = weights_K_V.shape[1]
    cuts_k = top_k < vocabulary
    count = min(max(_CANDIDATES, int((top_k * cuts_k).max())), vocabulary)
    while True:
        candidates = weights_K_V.topk(count, dim=-1)
        within_k = candidates.values * (torch.arange(count, device=weights_K_V.device) < top_k)
        cumulative = within_k.cumsum(-1)
        nucleus = top_p * torch.where(cuts_k, cumulative[:, -1:], total_K)
        if count == vocabulary or bool((cuts_k | (cumulative[:, -1:] >= nucleus)).all()):
            break
        count = min(count * 8, vocabulary)
    kept = within_k * (cumulative - within_k < nucleus)
    chosen = _invert(kept.cumsum(-1), uniform_K)
    return candidates.indices.gather(1, chosen)
