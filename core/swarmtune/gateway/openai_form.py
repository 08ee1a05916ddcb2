"""What the OpenAI-style dialects share: the error object, server-sent data lines, usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from swarmtune.gateway.dialect import Answer, Refused

DONE = b"data: [DONE]\n\n"

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 410: "permission_error"}


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def error_body(refusal: Refused) -> dict[str, Any]:
    fallback = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {
        "error": {
            "message": refusal.message,
            "type": _TYPES.get(refusal.status, fallback),
            "param": refusal.param,
            "code": refusal.code.value,
        }
    }


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Prompt tokens count once per prompt, whatever number of answers it got."""
    prompt = sum(a.prompt_tokens for a in answers[::n])
    cached = sum(a.cached_tokens for a in answers[::n])
    completion = sum(a.completion_tokens for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning_tokens for a in answers)},
    }
