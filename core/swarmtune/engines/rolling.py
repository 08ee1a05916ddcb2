"""A rolling batch over a transformers causal model: requests join and leave between decode steps.

Owns the running requests, their cache rows and the queues of waiting ones, one per lane: training and evaluation have
places of their own and come first in turns. `step` does one round: admit what fits
(prompts are padded into few forward passes; what another request has already computed is copied, not computed), else
decode one token for every running request. Row i of the cache always belongs to `self._running[i]`. A request never
changes what another one draws, apart from rounding: kernels may round differently at another batch size.
Not thread-safe but for `submit` and `abort`, which only fill the inbox that `step` empties.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from swarmtune.backend import RequestRefused
from swarmtune.engines.answers import Decode, check_request, find_stop, stop_bytes
from swarmtune.engines.constraint import Constraint, Grammars
from swarmtune.engines.kv_cache import BLOCK, Columns, PrefixStore, RowCache, TokenArray, WritePlan, common_prefix
from swarmtune.engines.sampler import RowParams, Sampled, sample, sample_allowed
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, Lane

ATTENTION = "swarmtune_grouped"
_PREFILL_TOKENS = 2048
"""Padded prompt tokens of one forward pass; also the longest time running requests wait for newcomers."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA in which the query heads that share a key head stand as further query positions of it.

    So keys and values are read where they lie in the cache instead of being repeated per query head, which costs more
    than the attention itself on a CPU. The mask comes already repeated: (rows, 1, group * T, width).

    Raises:
        NotImplementedError: the layer wants more than softmax(q k) v.
    """
    if unknown := [name for name in ("softcap", "s_aux") if others.get(name) is not None]:
        raise NotImplementedError(
            f"{type(module).__name__} needs {unknown[0]}, which the embedded engine does not have"
        )
    rows, heads, length, head_dim = query.shape
    key_heads = key.shape[1]
    grouped = query.reshape(rows, key_heads, heads // key_heads * length, head_dim)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, heads, length, value.shape[-1]).transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)


@dataclass(slots=True, eq=False)
class Running:
    """One request from submission to its last chunk."""

    request: GenerateRequest
    prompt: TokenArray
    context: list[int]
    """Prompt and everything sampled so far."""
    draw: random.Random
    stop_token_ids: frozenset[int]
    stop_bytes: int
    """Of `answers.stop_bytes`."""
    constraint: Constraint | None = None
    cached: int = 0
    """Leading tokens of `context` whose keys and values are in its cache row."""

    @property
    def sampled(self) -> int:
        return len(self.context) - len(self.prompt)


@dataclass(slots=True)
class _Newcomer:
    """A request about to be admitted, with what is already computed of it."""

    running: Running
    tokens: TokenArray
    prefix: int
    """Leading tokens that can be copied."""
    columns: Columns | None
    """Where they are, when in the store."""
    donor: int
    """Else the running row that has them."""
    twins: list[Running] = field(default_factory=list)
    """Requests with the same context: computed once."""

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prefix


Emission = tuple[str, GenerateChunk | Exception]
"""(request id, its next chunk, or why it failed)."""


class RollingBatch:
    """See the module's text. `model` comes from `hf.load_model`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch: int,
        context_length: int,
        decode: Decode,
        eos_token_ids: frozenset[int],
        seed: int = 0,
        weight_version: int = 0,
        grammars: Grammars | None = None,
        evaluation_slots: int = 0,
    ) -> None:
        """`evaluation_slots`: rows besides `max_batch` for evaluation requests alone; 0 lets them take any row."""
        self.model = model
        self.context_length = context_length
        self.weight_version = weight_version
        self._rows_of: dict[Lane, int] = {"train": max_batch, "evaluate": evaluation_slots}
        self._decode = decode
        self._eos = eos_token_ids
        self._seed = seed
        self._grammars = grammars
        self._device = model.device
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])  # pyright: ignore[reportOptionalMemberAccess] - load_model checked
        self._group: int = model.config.num_attention_heads // (
            getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        )
        self._masked = torch.finfo(model.dtype).min
        self._cache = RowCache(max_batch + evaluation_slots, context_length)
        self._store = PrefixStore(_prefix_bytes())
        self._running: list[Running] = []
        self._joined_last = False
        """Requests joined in the last round, so that those that were running got no token in it."""
        self._params: RowParams | None = None
        self._waiting: dict[Lane, deque[Running]] = {"train": deque(), "evaluate": deque()}
        """In turns, the lane that comes first stands first."""
        self._inbox: deque[GenerateRequest | str] = deque()
        self._seen_prompts: Counter[bytes] = Counter()

    @property
    def constrains(self) -> bool:
        return self._grammars is not None

    # From any thread.

    def compile(self, grammar: str) -> None:
        """Compile and remember a grammar: seconds for a model's first one, so not on an event loop.

        Raises:
            RequestRefused
        """
        if self._grammars is not None:
            self._grammars.start(grammar)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request for the next step.

        Raises:
            ContextOverflow, RequestRefused: it can never be served as asked.
        """
        self._check(request)
        self._inbox.append(request)

    def abort(self, request_id: str) -> None:
        """Drop a request, whatever its state, before the next token. It emits nothing more. Unknown ids are fine."""
        self._inbox.append(request_id)

    # On the torch thread.

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._running or any(self._waiting.values()))

    @property
    def has_running(self) -> bool:
        return bool(self._running)

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> list[Emission]:
        """One round; returns what came out of it. With admit=False only the running requests go on."""
        self._empty_inbox()
        emissions: list[Emission] = []
        joined: list[Running] = []
        if admit and self._may_admit():
            first = len(self._running)
            logits = self._admit()
            joined = self._running[first:]
            emissions += self._advance(joined, logits)
        if self._running and not joined:
            emissions += self._advance(list(self._running), self._forward_running())
        self._joined_last = bool(joined)
        return emissions

    def hold(self) -> None:
        """Put the running requests back in front of the queue; they keep their tokens and continue after a prefill."""
        self._empty_inbox()
        for running in reversed(self._running):
            self._waiting[self._lane_of(running)].appendleft(running)
        self._forget_rows()

    def take_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights in, casting to the model's dtype. Nothing may be running.

        Raises:
            ValueError: an unknown name, another shape, or a weight left out; the model is then half-updated.
        """
        assert not self._running, "hold() comes before new weights"
        copy_weights(self.model, tensors)
        self.weight_version = version
        self._store.clear()
        self._seen_prompts.clear()

    def clear(self) -> None:
        """Drop every request, as after an error inside `step`; the batch is empty and usable afterwards."""
        self._inbox.clear()
        for waiting in self._waiting.values():
            waiting.clear()
        self._store.clear()
        self._forget_rows()

    # Queue.

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, vocabulary=self._vocabulary, context_length=self.context_length)
        self._constraint(request)

    def _constraint(self, request: GenerateRequest) -> Constraint | None:
        if request.sampling.grammar is None:
            return None
        if self._grammars is None:
            raise RequestRefused("this engine does not constrain answers; send no grammar")
        return self._grammars.start(request.sampling.grammar)

    def _empty_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, GenerateRequest):
                received = self._receive(item)
                self._waiting[self._lane_of(received)].append(received)
            else:
                self._drop(item)

    def _lane_of(self, running: Running) -> Lane:
        return running.request.lane if self._rows_of["evaluate"] else "train"

    def _may_admit(self) -> bool:
        """Whether requests join in this round. After a round of newcomers, a lane that had none gets its next token
        first: no stream of one lane keeps the other from going on."""
        joining = {lane for lane, waiting in self._waiting.items() if waiting and self._free(lane)}
        if not joining or not self._joined_last:
            return bool(joining)
        return all(self._lane_of(running) in joining for running in self._running)

    def _free(self, lane: Lane) -> int:
        """Rows that requests of a lane may still take."""
        return self._rows_of[lane] - sum(self._lane_of(running) == lane for running in self._running)

    def _receive(self, request: GenerateRequest) -> Running:
        sampling = request.sampling
        return Running(
            request=request,
            prompt=np.asarray(request.prompt_token_ids, dtype=np.int64),
            context=list(request.prompt_token_ids),
            draw=random.Random(self._own_seed(request) if sampling.seed is None else sampling.seed),
            stop_token_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos),
            stop_bytes=stop_bytes(sampling.stop),
            constraint=self._constraint(request),
        )

    def _own_seed(self, request: GenerateRequest) -> int:
        """Seed of a request without one: the k-th use of a prompt under these weights draws the k-th stream.

        So a whole run can be repeated whatever order the requests of different clients arrive in.
        """
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int64).tobytes()
        key = hashlib.blake2b(prompt, digest_size=16).digest()
        self._seen_prompts[key] += 1
        text = f"{self._seed}:{self.weight_version}:{self._seen_prompts[key]}:{key.hex()}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def _drop(self, request_id: str) -> None:
        for queue in self._waiting.values():
            for waiting in queue:
                if waiting.request.request_id == request_id:
                    queue.remove(waiting)
                    return
        for row, running in enumerate(self._running):
            if running.request.request_id == request_id:
                self._leave(row)
                return

    # Rows.

    def _leave(self, row: int) -> None:
        """Free a row; the last one moves into its place."""
        last = len(self._running) - 1
        leaver = self._running[row]
        if leaver.cached >= BLOCK:
            tokens = np.asarray(leaver.context[: leaver.cached], dtype=np.int64)
            self._store.add(tokens, self._cache.take(row, leaver.cached))
        if row != last:
            self._cache.copy_row(last, row, self._running[last].cached)
            self._running[row] = self._running[last]
        self._running.pop()
        self._params = None

    def _forget_rows(self) -> None:
        self._running.clear()
        self._params = None
        self._cache.clear()

    # Prefill.

    def _admit(self) -> torch.Tensor:
        """Move waiting requests into rows, as many as one forward pass takes; returns their (rows, V) logits."""
        newcomers = self._choose()
        first = len(self._running)
        rows = first + sum(1 + len(n.twins) for n in newcomers)
        self._cache.reserve(rows, max(len(n.tokens) for n in newcomers))
        for row, newcomer in enumerate(newcomers, first):
            self._fill_prefix(row, newcomer)
        logits = self._forward_newcomers(newcomers, first)
        self._running += [n.running for n in newcomers]
        order = list(range(len(newcomers)))
        for at, newcomer in enumerate(newcomers):
            for twin in newcomer.twins:
                self._cache.copy_row(first + at, len(self._running), len(newcomer.tokens))
                self._running.append(twin)
                order.append(at)
        for running in self._running[first:]:
            running.cached = len(running.context)
        self._params = None
        return logits[order]

    def _choose(self) -> list[_Newcomer]:
        """Take waiting requests, of each lane the oldest first, while its rows and the padded token budget last."""
        chosen: dict[bytes, _Newcomer] = {}
        longest = 0
        for lane, waiting in self._waiting.items():
            free = self._free(lane)
            while waiting and free:
                running = waiting[0]
                tokens = np.asarray(running.context, dtype=np.int64)
                if twin := chosen.get(tokens.tobytes()):
                    twin.twins.append(running)
                else:
                    newcomer = self._find_prefix(running, tokens)
                    grown = max(longest, newcomer.new_tokens)
                    if chosen and grown * (len(chosen) + 1) > _PREFILL_TOKENS:
                        break
                    longest = grown
                    chosen[tokens.tobytes()] = newcomer
                waiting.popleft()
                free -= 1
        self._waiting = dict(reversed(self._waiting.items()))
        return list(chosen.values())

    def _find_prefix(self, running: Running, tokens: TokenArray) -> _Newcomer:
        """The longest part of the context that some row or the store has; at least one token stays to be computed."""
        usable = tokens[:-1]
        prefix, columns = self._store.longest(usable)
        donor = -1
        for row, other in enumerate(self._running):
            if (common := common_prefix(other.prompt[: other.cached], usable)) > prefix:
                prefix, columns, donor = common, None, row
        if prefix < BLOCK:
            return _Newcomer(running, tokens, 0, None, -1)
        return _Newcomer(running, tokens, prefix, columns, donor)

    def _fill_prefix(self, row: int, newcomer: _Newcomer) -> None:
        if newcomer.columns is not None:
            self._cache.put(row, newcomer.columns, newcomer.prefix)
        elif newcomer.prefix:
            self._cache.copy_row(newcomer.donor, row, newcomer.prefix)

    def _forward_newcomers(self, newcomers: Sequence[_Newcomer], first: int) -> torch.Tensor:
        """Compute what is new of each, padded on the left so that every last token is in the last column."""
        length = max(n.new_tokens for n in newcomers)
        shape = (len(newcomers), length)
        tokens = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        slots = np.full(shape, self._cache.spare_slot, dtype=np.int64)
        for i, newcomer in enumerate(newcomers):
            at = slice(length - newcomer.new_tokens, length)
            columns = np.arange(newcomer.prefix, len(newcomer.tokens))
            tokens[i, at] = newcomer.tokens[newcomer.prefix :]
            positions[i, at] = columns
            slots[i, at] = self._cache.slot(first + i, 0) + columns
        width = max(len(n.tokens) for n in newcomers)
        return self._forward(tokens, positions, slots, first, width)

    # Decode.

    def _forward_running(self) -> torch.Tensor:
        """(rows, V) logits after the last sampled token of every running request."""
        lengths = np.array([r.cached for r in self._running], dtype=np.int64)
        width = int(lengths.max()) + 1
        self._cache.reserve(len(self._running), width)
        last = np.array([r.context[-1] for r in self._running], dtype=np.int64)
        slots = np.arange(len(self._running), dtype=np.int64) * self._cache.columns + lengths
        logits = self._forward(last[:, None], lengths[:, None], slots, 0, width)
        for running in self._running:
            running.cached += 1
        return logits

    def _forward(
        self, tokens: TokenArray, positions: TokenArray, slots: TokenArray, first_row: int, width: int
    ) -> torch.Tensor:
        """Run the model on (rows, T) new tokens of rows first_row…; a token sees the columns up to its own position."""
        at = torch.from_numpy(positions).to(self._device)
        self._cache.plan(WritePlan(first_row, len(tokens), width, torch.from_numpy(slots.reshape(-1)).to(self._device)))
        hidden = torch.arange(width, device=self._device) > at[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self._device).masked_fill_(hidden, self._masked)
        rows, length = tokens.shape
        mask = mask[:, None, None].expand(rows, 1, self._group, length, width).reshape(rows, 1, -1, width)
        output = self.model(
            input_ids=torch.from_numpy(tokens).to(self._device),
            attention_mask=mask,
            position_ids=at,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    # Sampling.

    def _advance(self, rows: list[Running], logits: torch.Tensor) -> list[Emission]:
        """Give each of these requests its next token; those that end leave."""
        if len(rows) == len(self._running):
            params = self._params = self._params or RowParams.of([r.request.sampling for r in rows], self._vocabulary)
        else:
            params = RowParams.of([r.request.sampling for r in rows], self._vocabulary)
        uniforms = [r.draw.random() for r in rows]
        drawn = self._constrained(rows, logits, uniforms, sample(logits, params, uniforms))
        emissions: list[Emission] = []
        ended: set[Running] = set()
        for i, running in enumerate(rows):
            outcome = self._accept(running, drawn, i)
            emissions.append((running.request.request_id, outcome))
            if isinstance(outcome, Exception) or outcome.finish_reason is not None:
                ended.add(running)
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row] in ended:
                self._leave(row)
        return emissions

    def _constrained(
        self, rows: Sequence[Running], logits_R_V: torch.Tensor, uniforms: Sequence[float], drawn: Sampled
    ) -> Sampled:
        """Tokens of rows with a grammar, drawn again from what it allows; logprobs stay the whole distribution's."""
        for row, running in enumerate(rows):
            if running.constraint is None:
                continue
            allowed_V = running.constraint.allowed(self._vocabulary, running.stop_token_ids).to(logits_R_V.device)
            params = RowParams.of([running.request.sampling], self._vocabulary)
            token, logprob = sample_allowed(logits_R_V[row], allowed_V, params, uniforms[row])
            running.constraint.take(token)
            drawn.tokens[row], drawn.logprobs[row] = token, logprob
        return drawn

    def _accept(self, running: Running, drawn: Sampled, row: int) -> GenerateChunk | Exception:
        logprob = drawn.logprobs[row]
        if not math.isfinite(logprob):
            return ArithmeticError("the model's logits are not finite; a smaller learning rate may keep them so")
        token = drawn.tokens[row]
        running.context.append(token)
        reason, stop_string = self._finish(running, token)
        wanted = running.request.sampling.top_logprobs
        top = None
        if wanted and drawn.top_ids is not None and drawn.top_logprobs is not None:
            top = [dict(zip(drawn.top_ids[row][:wanted], drawn.top_logprobs[row][:wanted], strict=True))]
        return GenerateChunk([token], [logprob], self.weight_version, reason, stop_string, top)

    def _finish(self, running: Running, token: int) -> tuple[FinishReason | None, str | None]:
        if token in running.stop_token_ids:
            return FinishReason.STOP, None
        if running.stop_bytes and (found := self._find_stop(running)) is not None:
            return FinishReason.STOP, found
        if running.sampled >= running.request.sampling.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _find_stop(self, running: Running) -> str | None:
        """The stop string that the newest token completed; of several, the one that begins first."""
        sampled = running.context[len(running.prompt) :]
        return find_stop(sampled, running.request.sampling.stop, self._decode, longest=running.stop_bytes)


def copy_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy named tensors into the model, casting to its dtype. Tied weights may come under either name or both.

    Raises:
        ValueError: an unknown name, another shape, or a weight left out.
    """
    targets = model.state_dict()
    missing = {tensor.data_ptr(): name for name, tensor in targets.items()}
    with torch.no_grad():
        for name, tensor in tensors:
            if (target := targets.get(name)) is None or target.shape != tensor.shape:
                have = "no such weight" if target is None else f"shape {tuple(target.shape)}"
                raise ValueError(f"{name}: the trainer sent shape {tuple(tensor.shape)}, the engine has {have}")
            target.copy_(tensor)
            missing.pop(target.data_ptr(), None)
    if missing:
        raise ValueError(f"the trainer left out {len(missing)} weights, among them {next(iter(missing.values()))}")


def _prefix_bytes() -> int:
    """A sixteenth of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16
