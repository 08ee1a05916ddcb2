"""OpenAI Completions: raw prompts, as text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swarmtune.gateway.dialect import Answer, CallInfo, Delta, ModelCall, Refused, TokenLogprob, malformed, unsupported
from swarmtune.gateway.fields import NEUTRAL, boolean, integer, refuse_unhonoured, retry_count, sampling_asked
from swarmtune.gateway.openai_form import DONE, error_body, event, usage
from swarmtune.types import FinishReason

MAX_PROMPTS = 256
MAX_CHOICES = 128
DEFAULT_MAX_TOKENS = 16
"""The API's own default."""

_NEUTRAL = NEUTRAL | {"echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},)}
_UNDERSTOOD = frozenset(
    "model prompt temperature top_p top_k max_tokens stop stop_token_ids seed ignore_eos n best_of logprobs stream "
    "stream_options".split()
) | frozenset(_NEUTRAL)


class CompletionsDialect:
    name = "completions"

    def decode(self, body: dict[str, Any], headers: Mapping[str, str]) -> ModelCall:
        refuse_unhonoured(body, _NEUTRAL)
        n = integer(body, "n", 1, MAX_CHOICES) or 1
        if (integer(body, "best_of", 1, MAX_CHOICES) or n) != n:
            raise unsupported("best_of", "answers are not ranked here; send it equal to n or leave it out")
        logprobs = integer(body, "logprobs", 0, 20)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise malformed("stream_options", "must be an object")
        sampling = sampling_asked(body, ("max_tokens",))
        if sampling.max_tokens is None:
            sampling.max_tokens = DEFAULT_MAX_TOKENS
        return ModelCall(
            dialect=self.name,
            model=str(body.get("model") or ""),
            prompts=_prompts(body.get("prompt")),
            sampling=sampling,
            n=n,
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            stream=boolean(body, "stream"),
            include_usage=boolean(options, "include_usage"),
            ignored=tuple(sorted(body.keys() - _UNDERSTOOD)),
            retry_count=retry_count(headers),
        )

    def whole(self, call: ModelCall, info: CallInfo, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{info.response_id}",
            "object": "text_completion",
            "created": info.created,
            "model": info.model,
            "choices": [
                {
                    "index": index,
                    "text": answer.message.content,
                    "logprobs": _logprobs(answer.logprobs) if call.logprobs else None,
                    "finish_reason": _finish(answer),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage(answers, call.n),
        }

    def stream(self, call: ModelCall, info: CallInfo) -> CompletionsStream:
        return CompletionsStream(call, info)

    def error(self, refusal: Refused) -> dict[str, Any]:
        return error_body(refusal)


class CompletionsStream:
    def __init__(self, call: ModelCall, info: CallInfo) -> None:
        self._call = call
        self._offsets: dict[int, int] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{info.response_id}",
            "object": "text_completion",
            "created": info.created,
            "model": info.model,
        }

    def delta(self, choice: int, delta: Delta) -> bytes:
        return self._chunk(choice, delta.content, logprobs=list(delta.logprobs))

    def finish(self, choice: int, answer: Answer) -> bytes:
        return self._chunk(choice, "", finish=_finish(answer))

    def close(self, answers: Sequence[Answer]) -> bytes:
        if not self._call.include_usage:
            return DONE
        return event(self._head | {"choices": [], "usage": usage(answers, self._call.n)}) + DONE

    def error(self, refusal: Refused) -> bytes:
        return event(error_body(refusal))

    def _chunk(
        self, choice: int, text: str, *, finish: str | None = None, logprobs: list[TokenLogprob] | None = None
    ) -> bytes:
        shown = None
        if self._call.logprobs and logprobs:
            start = self._offsets.get(choice, 0)
            shown = _logprobs(logprobs, start)
            self._offsets[choice] = start + sum(len(entry.text) for entry in logprobs)
        payload: dict[str, Any] = self._head | {
            "choices": [{"index": choice, "text": text, "logprobs": shown, "finish_reason": finish}]
        }
        if self._call.include_usage:
            payload["usage"] = None
        return event(payload)


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        return (value,)
    if (
        isinstance(value, list)
        and 0 < len(value) <= MAX_PROMPTS
        and all(isinstance(v, str) or _is_ids(v) for v in value)
    ):
        return tuple(value)
    raise malformed("prompt", f"must be a string, token ids, or a list of up to {MAX_PROMPTS} of either")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int and 0 <= v < 2**31 for v in value)


def _finish(answer: Answer) -> str:
    return "length" if answer.finish_reason is FinishReason.LENGTH else "stop"


def _logprobs(entries: list[TokenLogprob] | None, start: int = 0) -> dict[str, Any]:
    entries = entries or []
    offsets = []
    for entry in entries:
        offsets.append(start)
        start += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [dict(entry.top) for entry in entries],
        "text_offset": offsets,
    }
