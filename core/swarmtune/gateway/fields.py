"""Reading request bodies: typed fields with refusals that name the field, and content in every form clients send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from swarmtune.gateway.dialect import JsonFormat, SamplingAsked, malformed, unsupported

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise malformed(name, f"must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def integer(body: Mapping[str, Any], name: str, low: int, high: int = 2**63) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        upper = f" to {high}" if high < 2**62 else " up"
        raise malformed(name, f"must be a whole number from {low}{upper}, not {value!r}")
    return value


def boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise malformed(name, f"must be true or false, not {value!r}")
    return value


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise malformed(name, f"must be a string, not {type(value).__name__}")
    return value


def text_or_none(value: Any) -> str | None:
    """A string; anything else says nothing."""
    return value if isinstance(value, str) else None


def object_or_empty(value: Any) -> dict[str, Any]:
    """A JSON object; anything else says nothing."""
    return value if isinstance(value, dict) else {}


def stop_strings(value: Any, name: str = "stop") -> tuple[str, ...] | None:
    """A string, a list of strings, or nothing; empty strings stop nothing and are left out."""
    if value is None:
        return None
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise malformed(name, "must be a string or a list of strings")
    return tuple(v for v in values if v) or None


def text_content(value: Any, name: str) -> str:
    """Content as one text: a string, null, or a list of text parts.

    Raises:
        Refused: a part that is not text.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(name, f"must be a string, null or a list of parts, not {type(value).__name__}")
    return "".join(_part_text(part, f"{name}[{at}]") for at, part in enumerate(value))


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise malformed(name, "must be an object with a type")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise unsupported(name, f"parts of type {kind!r} cannot be shown to this model, which reads text only")
    return string(part.get("refusal" if kind == "refusal" else "text", ""), name)


def arguments_text(value: Any) -> str:
    """A call's arguments as JSON text; an object (some clients parse them) is written compactly."""
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def json_format(value: Any, fields: Any, param: str) -> JsonFormat | None:
    """The format that an answer is asked to have.

    Args:
        value: of the field `param`: `{"type": "json_schema", …}`, `{"type": "json_object"}`, or text.
        fields: the object that holds schema and strict; None where there is none.
    """
    kind = object_or_empty(value).get("type", value)
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return JsonFormat({"type": "object"}, False, param)
    if kind != "json_schema":
        raise unsupported(param, f"{kind!r} is not one of text, json_object, json_schema")
    schema = object_or_empty(fields).get("schema")
    if not isinstance(schema, dict):
        raise malformed(f"{param}.schema", "must be a JSON schema object")
    return JsonFormat(schema, object_or_empty(fields).get("strict") is True, param)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "bad_words": ([],),
}
"""Fields that would change what is sampled and that no engine here honours, with the values that change nothing."""


def refuse_unhonoured(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    for name, harmless in neutral.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name, f"the engine cannot honour {value!r}; leave it out or send {harmless[0]!r}")


def sampling_asked(body: Mapping[str, Any], max_tokens_names: Sequence[str]) -> SamplingAsked:
    """The sampling fields that the OpenAI-style dialects share."""
    stop_ids = body.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in stop_ids):
        raise malformed("stop_token_ids", "must be a list of token ids")
    limits = [limit for name in max_tokens_names if (limit := integer(body, name, 1)) is not None]
    return SamplingAsked(
        temperature=number(body, "temperature", 0.0, 2.0),
        top_p=number(body, "top_p", 0.0, 1.0),
        top_k=integer(body, "top_k", -1),
        max_tokens=limits[0] if limits else None,
        stop=stop_strings(body.get("stop")),
        stop_token_ids=tuple(stop_ids),
        seed=integer(body, "seed", -(2**63)),
        ignore_eos=boolean(body, "ignore_eos"),
    )


def retry_count(headers: Mapping[str, str]) -> int:
    value = headers.get("x-stainless-retry-count", "0")
    return int(value[:9]) if value.isdecimal() else 0
