"""What every engine does alike with one request: refuse what it cannot serve, find the stop string that ends an answer.

Plain functions; no torch, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from swarmtune.backend import ContextOverflow, RequestRefused
from swarmtune.types import GenerateRequest

_MARGIN_TOKENS = 4
"""Decoded in front of a stop string's window, since decoders treat the first token of a text specially."""

Decode = Callable[[list[int]], str]


def check_request(request: GenerateRequest, *, vocabulary: int, context_length: int) -> None:
    """Refuse a request that can never be served as asked.

    Raises:
        ContextOverflow, RequestRefused
    """
    prompt, params = request.prompt_token_ids, request.sampling
    if not prompt:
        raise RequestRefused("the prompt is empty; send at least one token")
    if not all(isinstance(token, int) and 0 <= token < vocabulary for token in prompt):
        raise RequestRefused(f"a prompt token is outside the vocabulary of {vocabulary} tokens")
    if params.max_tokens < 1 or not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise RequestRefused("max_tokens must be at least 1 and temperature a finite number of at least 0")
    if not 0 < params.top_p <= 1 or params.top_k < 0 or params.top_logprobs < 0:
        raise RequestRefused("top_p must be in (0, 1], top_k and top_logprobs at least 0")
    if len(prompt) + params.max_tokens > context_length:
        raise ContextOverflow(
            f"{len(prompt)} prompt tokens plus max_tokens {params.max_tokens} are more than the context of "
            f"{context_length}; shorten the prompt or lower max_tokens"
        )


def stop_bytes(stops: Sequence[str]) -> int:
    """Length of the longest stop string; a match that ends now began at most so many tokens ago."""
    return max((len(stop.encode()) for stop in stops), default=0)


def find_stop(sampled: Sequence[int], stops: Sequence[str], decode: Decode, *, longest: int) -> str | None:
    """The stop string that the newest sampled token completed; of several, the one that begins first.

    Args:
        longest: `stop_bytes(stops)`, computed once per request.
    """
    text = decode(list(sampled[-(longest + _MARGIN_TOKENS) :]))
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None
