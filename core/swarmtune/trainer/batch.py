"""Finished episodes → rows → mini-batches → micro-batches.

Promises: every sampled token that has a context is in exactly one row of one mini-batch per epoch; nothing is dropped
so that numbers divide; the loss weights of a mini-batch sum to 1, so that neither the packing into micro-batches nor
the number of rows an episode was split into changes the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from swarmtune.types import FinishedEpisode, Sample

MIN_SHARED = 16
"""Shorter common prefixes are not worth a block mask."""
MAX_BUNDLE = 1024
"""Tokens of one bundle: its block mask is dense, so attention costs the square of it."""
MAX_PADDING = 0.2
"""Share of padding in a micro-batch beyond which another one is begun."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row. All tensors have shape (T,); the first token is never under the loss mask."""

    episode: int
    """Index of its episode in the batch."""
    tokens: torch.Tensor
    loss_mask: torch.Tensor
    """Boolean."""
    rollout_logprobs: torch.Tensor
    exact: torch.Tensor
    """Boolean: the token was sampled in exactly this context, so its rollout logprob may be compared with ours."""
    advantages: torch.Tensor
    sources: torch.Tensor
    """Integer: which of its episode's sampled tokens each token under the mask is, counted row after row."""
    temperature: float
    own_logprobs: torch.Tensor | None = None
    """The policy's before the first optimizer step, where they were computed."""
    old_logprobs: torch.Tensor | None = None
    """What the losses' ratio is taken against, where that was settled before the first optimizer step."""
    ref_logprobs: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    """Importance weights that are fixed for the update."""
    values: torch.Tensor | None = None
    """The critic's, of the state before each token, before its first optimizer step."""
    returns: torch.Tensor | None = None
    """What the critic learns to predict."""

    @property
    def targets(self) -> int:
        """Number of tokens under the loss mask."""
        return int(self.loss_mask.sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one under the loss mask; at least 1."""
        return int(self.loss_mask.int().argmax())


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a batch, and what could not be trained."""

    rows: list[Row]
    no_context: int
    """Sampled tokens at the very beginning of a row: nothing predicts them."""
    over_context: int
    """Sampled tokens beyond the length the model was made for."""


def build_rows(
    episodes: Sequence[FinishedEpisode],
    advantages: Sequence[torch.Tensor] | None = None,
    *,
    max_length: int | None = None,
) -> Rows:
    """Turn every sample with something to learn from into a row.

    Args:
        advantages: per episode, one value per sampled token, row after row; None leaves them 0.
        max_length: tokens after it are cut off and counted; None cuts nothing.
    """
    rows: list[Row] = []
    no_context = over_context = 0
    for index, episode in enumerate(episodes):
        cursor = 0
        for sample in episode.samples:
            row = _row(index, sample, cursor)
            cursor += sum(sample.loss_mask)
            no_context += bool(sample.loss_mask and sample.loss_mask[0])
            if max_length is not None and len(row.tokens) > max_length:
                over_context += int(row.loss_mask[max_length:].sum())
                row = _cut(row, max_length)
            if row.targets:
                rows.append(row)
    if advantages is not None:
        spread = from_episodes(rows, advantages)
        rows = [replace(row, advantages=values) for row, values in zip(rows, spread, strict=True)]
    return Rows(rows, no_context, over_context)


def from_episodes(rows: Sequence[Row], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Per episode a value for each sampled token → per row (T,), 0 off the mask."""
    spread = []
    for row in rows:
        own = torch.zeros(len(row.tokens))
        own[row.loss_mask] = values[row.episode][row.sources[row.loss_mask]].float()
        spread.append(own)
    return spread


def to_episodes(
    rows: Sequence[Row], values: Sequence[torch.Tensor], episodes: Sequence[FinishedEpisode]
) -> list[torch.Tensor]:
    """Per row (T,) → per episode a value for each sampled token, 0 for those that are in no row."""
    gathered = [torch.zeros(e.sampled_tokens) for e in episodes]
    for row, own in zip(rows, values, strict=True):
        gathered[row.episode][row.sources[row.loss_mask]] = own[row.loss_mask].float()
    return gathered


def _row(episode: int, sample: Sample, before: int) -> Row:
    """`before`: sampled tokens in the episode's earlier rows."""
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    sources = before + mask.cumsum(0) - 1
    exact = torch.ones_like(mask) if sample.context_exact is None else torch.tensor(sample.context_exact).bool()
    mask[:1] = False
    return Row(
        episode=episode,
        tokens=torch.tensor(sample.token_ids, dtype=torch.long),
        loss_mask=mask,
        rollout_logprobs=torch.tensor(sample.logprobs, dtype=torch.float32),
        exact=exact,
        advantages=torch.zeros(len(mask)),
        sources=sources,
        temperature=sample.temperature if sample.temperature > 0 else 1.0,
    )


def _cut(row: Row, length: int) -> Row:
    return replace(
        row,
        tokens=row.tokens[:length],
        loss_mask=row.loss_mask[:length],
        rollout_logprobs=row.rollout_logprobs[:length],
        exact=row.exact[:length],
        advantages=row.advantages[:length],
        sources=row.sources[:length],
    )


def split_by_episode(rows: Sequence[Row], parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffle the episodes into at most `parts` mini-batches of nearly equal count; row indices of each, none empty."""
    episodes = sorted({row.episode for row in rows})
    if parts == 1:
        return [list(range(len(rows)))]
    order = rng.permutation(episodes)
    chosen = [set(part.tolist()) for part in np.array_split(order, min(parts, len(order)))]
    return [[i for i, row in enumerate(rows) if row.episode in part] for part in chosen]


def loss_weights(rows: Sequence[Row], loss_agg: str) -> list[float]:
    """Per row, the weight of each of its tokens under the mask; over all rows and tokens they sum to 1.

    `episode-mean`: an episode's mean token loss counts 1/E however many rows it has. `token-mean`: each token 1/T.
    """
    if loss_agg == "token-mean":
        total = sum(row.targets for row in rows)
        return [1.0 / total] * len(rows)
    tokens: dict[int, int] = {}
    for row in rows:
        tokens[row.episode] = tokens.get(row.episode, 0) + row.targets
    return [1.0 / (len(tokens) * tokens[row.episode]) for row in rows]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows computed as one sequence: their common prefix once, then what each has of its own."""

    rows: list[int]
    shared: int
    """Tokens of the common prefix; 0 for a row by itself."""
    length: int
    """Tokens of the sequence."""


def bundle_rows(rows: Sequence[Row], indices: Sequence[int], limit: int) -> list[Bundle]:
    """Join rows with a common prefix while that saves tokens and the bundle stays within `limit` tokens."""
    tokens = {i: rows[i].tokens.numpy() for i in indices}
    order = sorted(indices, key=lambda i: tokens[i].tolist())
    bundles: list[Bundle] = []
    for i in order:
        joined = _joined(bundles[-1], i, tokens, limit) if bundles else None
        if joined is None:
            bundles.append(Bundle([i], 0, len(tokens[i])))
        else:
            bundles[-1] = joined
    return bundles


def _joined(bundle: Bundle, row: int, tokens: dict[int, np.ndarray], limit: int) -> Bundle | None:
    first, length = tokens[bundle.rows[0]], len(tokens[row])
    shared = _common_prefix(first[: bundle.shared] if len(bundle.rows) > 1 else first, tokens[row])
    total = shared + sum(len(tokens[i]) - shared for i in (*bundle.rows, row))
    if shared < MIN_SHARED or total > limit or total >= bundle.length + length:
        return None
    return Bundle([*bundle.rows, row], shared, total)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def pack(bundles: Sequence[Bundle], tokens: int) -> list[list[Bundle]]:
    """Bundles of similar length into micro-batches of at most `tokens` tokens, padding included.

    A longer bundle is a micro-batch of its own.
    """
    packs: list[list[Bundle]] = []
    for bundle in sorted(bundles, key=lambda b: -b.length):
        if packs:
            width = packs[-1][0].length
            padded = width * (len(packs[-1]) + 1)
            real = sum(b.length for b in packs[-1]) + bundle.length
            if padded <= tokens and padded - real <= MAX_PADDING * padded:
                packs[-1].append(bundle)
                continue
        packs.append([bundle])
    return packs


def pack_for_ranks(bundles: Sequence[Bundle], tokens: int, ranks: int) -> list[list[Bundle]]:
    """As `pack`, in rounds of one micro-batch per rank, the tokens spread evenly over the ranks.

    A rank with fewer micro-batches than another has its own split; one that has nothing to split gets empty ones.
    """
    hands: list[list[Bundle]] = [[] for _ in range(ranks)]
    for bundle in sorted(bundles, key=lambda b: -b.length):
        min(hands, key=lambda hand: sum(b.length for b in hand)).append(bundle)
    packed = [pack(hand, tokens) for hand in hands]
    rounds = max(len(packs) for packs in packed)
    return [packs[n] for n in range(rounds) for packs in [_split_into(packs, rounds) for packs in packed]]


def _split_into(packs: list[list[Bundle]], number: int) -> list[list[Bundle]]:
    """At least `number` micro-batches by halving the fullest, the largest first, then empty ones."""
    packs = list(packs)
    while len(packs) < number and any(len(p) > 1 for p in packs):
        fullest = max(packs, key=len)
        packs.remove(fullest)
        packs += [fullest[: len(fullest) // 2], fullest[len(fullest) // 2 :]]
    packs.sort(key=lambda p: -len(p) * p[0].length)
    return packs + [[] for _ in range(number - len(packs))]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass sees."""

    rows: list[int]
    """Indices into the batch's rows, in the order of `data`. Empty: it only keeps a rank in step with the others, and
    `data`, a copy of another micro-batch marked `padding`, counts nothing."""
    data: TensorDict
    computed_tokens: int
    """Tokens of the padded sequences."""


def micro_batches(
    rows: Sequence[Row],
    indices: Sequence[int],
    *,
    tokens: int,
    loss_agg: str = "token-mean",
    share_prefixes: bool = True,
    entropy_grad: bool = False,
    ranks: int = 1,
) -> list[MicroBatch]:
    """One mini-batch (the rows at `indices`) as micro-batches of at most `tokens` tokens, in rounds of one per rank."""
    weights = dict(zip(indices, loss_weights([rows[i] for i in indices], loss_agg), strict=True))
    limit = min(tokens, MAX_BUNDLE) if share_prefixes else 0
    bundles = bundle_rows(rows, indices, limit)
    if ranks > 1:
        share = -(-sum(bundle.length for bundle in bundles) // ranks)
        bundles = bundle_rows(rows, indices, min(limit, share))
    packs = pack(bundles, tokens) if ranks == 1 else pack_for_ranks(bundles, tokens, ranks)
    micros = [_micro_batch(rows, chosen, weights, entropy_grad=entropy_grad) for chosen in packs if chosen]
    if len(micros) == len(packs):
        return micros
    padding, real = _padding(min(micros, key=lambda m: m.computed_tokens)), iter(micros)
    return [next(real) if chosen else padding for chosen in packs]


def _padding(of: MicroBatch) -> MicroBatch:
    data = of.data.clone()
    tu.assign_non_tensor(data, padding=True)
    return MicroBatch([], data, of.computed_tokens)


def _micro_batch(
    rows: Sequence[Row], bundles: Sequence[Bundle], weights: dict[int, float], *, entropy_grad: bool
) -> MicroBatch:
    order = [i for bundle in bundles for i in bundle.rows]
    chosen = [rows[i] for i in order]
    starts = [row.prompt_length for row in chosen]
    nested = {
        "input_ids": [row.tokens for row in chosen],
        "position_ids": [torch.arange(len(row.tokens)) for row in chosen],
        "loss_mask": [row.loss_mask for row in chosen],
        "prompts": [row.tokens[:s] for row, s in zip(chosen, starts, strict=True)],
        "responses": [row.tokens[s:] for row, s in zip(chosen, starts, strict=True)],
        "response_mask": [row.loss_mask[s:] for row, s in zip(chosen, starts, strict=True)],
        "exact": [row.exact[s:] for row, s in zip(chosen, starts, strict=True)],
        "rollout_log_probs": [row.rollout_logprobs[s:] for row, s in zip(chosen, starts, strict=True)],
        "advantages": [row.advantages[s:] for row, s in zip(chosen, starts, strict=True)],
    }
    for name, values in (
        ("old_log_probs", [row.old_logprobs for row in chosen]),
        ("ref_log_prob", [row.ref_logprobs for row in chosen]),
        ("rollout_is_weights", [row.importance for row in chosen]),
        ("values", [row.values for row in chosen]),
        ("returns", [row.returns for row in chosen]),
    ):
        if all(v is not None for v in values):
            nested[name] = [v[s:] for v, s in zip(values, starts, strict=True) if v is not None]
    tensors: dict[str, torch.Tensor | list] = {
        name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in nested.items()
    }
    tensors["temperature"] = torch.tensor([row.temperature for row in chosen])
    tensors["loss_weights"] = torch.tensor([weights[i] for i in order])
    tensors["bundle"] = torch.tensor([b for b, bundle in enumerate(bundles) for _ in bundle.rows])
    tensors["shared"] = torch.tensor([bundle.shared for bundle in bundles for _ in bundle.rows])
    data = tu.get_tensordict(
        tensor_dict=tensors,
        non_tensor_dict={
            "calculate_entropy": entropy_grad,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(order),
            "global_batch_size": len(order),
        },
    )
    return MicroBatch(order, data, len(bundles) * max(b.length for b in bundles))
