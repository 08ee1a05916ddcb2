"""Renderer for the model families that the library `renderers` knows, adapted to our contract.

The library is imported only when such a model is loaded, and brings neither transformers nor torch.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmtune.rendering.generic import as_ids, spans_ending_at
from swarmtune.rendering.parsing import parse_call
from swarmtune.rendering.renderer import Rendered, TemplateRefused
from swarmtune.rendering.template import later_system_as_user, message_as_dict, tool_as_dict
from swarmtune.rendering.tokenizer import Encoded, TextStream, Tokenizer, read_json
from swarmtune.types import Message, ToolCall, ToolSpec

_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


def family_of(folder: Path) -> str | None:
    """The library's name for the family of a model folder; None where it knows none or is not installed.

    Told by the hub id alone, since fine-tunes may carry another template: from the hub cache's folder name, the last
    two parts of the path, or `_name_or_path` in config.json.
    """
    if importlib.util.find_spec("renderers") is None:
        return None
    from renderers.base import MODEL_RENDERER_MAP

    where = folder.resolve().as_posix()
    cached = _HUB_CACHE.search(f"{folder.absolute().as_posix()}/")
    names = [
        f"{cached.group(1)}/{cached.group(2)}" if cached else "",
        "/".join(where.split("/")[-2:]),
        str(read_json(folder / "config.json").get("_name_or_path", "")),
    ]
    return next((MODEL_RENDERER_MAP[name] for name in names if name in MODEL_RENDERER_MAP), None)


class KnownRenderer:
    """One family's renderer, in two settings: as its template has it, and keeping all thinking."""

    def __init__(self, tokenizer: Tokenizer, family: str, *, end_token_ids: Sequence[int] = ()) -> None:
        self.name = family
        self._tokenizer = tokenizer
        self._seats_system_first = False
        self._templated = _create(tokenizer, family, {})
        self._keeping = _create(tokenizer, family, {"thinking_retention": "all"})
        self.stop_token_ids = tuple(dict.fromkeys([*self._templated.get_stop_token_ids(), *end_token_ids]))
        self._opening = self._find_opening()
        self._seats_system_first = self._refuses_a_later_system_message()

    @classmethod
    def load(cls, folder: Path, family: str) -> KnownRenderer:
        """Read a model folder.

        Raises:
            FileNotFoundError, ValueError, ModuleNotFoundError: see `load_renderer`.
        """
        tokenizer = Tokenizer.load(folder)
        config = read_json(folder / "generation_config.json") or read_json(folder / "config.json")
        return cls(tokenizer, family, end_token_ids=as_ids(config.get("eos_token_id")))

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = True
    ) -> Rendered:
        rendered = _refusing(
            self._templated.render,
            [message_as_dict(message) for message in self._seated(messages, at_start=True)],
            tools=_tools(tools),
            add_generation_prompt=generation_prompt,
        )
        ids = list(rendered.token_ids)
        ends = self._ends(ids, list(rendered.message_indices), messages)
        if ends and not generation_prompt:
            ends[-1] = len(ids)
        return Rendered(ids, spans_ending_at(ends))

    def extend(
        self,
        prefix_ids: Sequence[int],
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        keep: bool = False,
    ) -> Rendered | None:
        prefix = list(prefix_ids)
        if history[-1].role == "assistant" and all(message.role != "assistant" for message in new):
            start = self._answer_start(prefix)
            bridged = _refusing(
                (self._keeping if keep else self._templated).bridge_to_next_turn,
                prefix[:start],
                prefix[start:],
                [message_as_dict(message) for message in self._seated(new, at_start=False)],
                tools=_tools(tools),
            )
            if bridged is not None and list(bridged.token_ids[: len(prefix)]) == prefix:
                ids = list(bridged.token_ids[len(prefix) :])
                ends = self._ends(ids, list(bridged.message_indices[len(prefix) :]), new)
                return Rendered(ids, spans_ending_at(ends))
        return self._suffix_of_whole(prefix, history, new, tools)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        parsed = self._templated.parse_response(list(token_ids), tools=_tools(tools), prompt_ids=self._opening)
        calls: list[ToolCall] = []
        content = parsed.content
        for attempt in parsed.tool_calls if tools else ():
            if attempt.name and attempt.arguments is not None:
                calls.append(_as_written(attempt.raw) or ToolCall("", attempt.name, _json(attempt.arguments)))
            elif not calls:  # what comes after a call goes unheard
                content += self.decode(token_ids[slice(*attempt.token_span)]) if attempt.token_span else attempt.raw
        if parsed.tool_calls and not tools:
            content = self.decode(token_ids)
        return Message("assistant", content, tool_calls=tuple(calls), reasoning=parsed.reasoning_content or None)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(token_ids, special=special)

    def stream(self) -> TextStream:
        return self._tokenizer.stream()

    def _suffix_of_whole(
        self, prefix: list[int], history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Rendered | None:
        """What a whole rendering adds to the prefix, where it begins with it to the token."""
        whole = self.render([*history, *new], tools)
        if whole.token_ids[: len(prefix)] != prefix:
            return None
        ends = [max(end - len(prefix), 0) for _, end in whole.spans[len(history) :]]
        return Rendered(whole.token_ids[len(prefix) :], spans_ending_at(ends))

    def _ends(self, ids: list[int], owners: list[int], messages: Sequence[Message]) -> list[int]:
        """Where each message's tokens end; an assistant's with its end-of-turn token."""
        last = {owner: index for index, owner in enumerate(owners) if owner >= 0}
        ends: list[int] = []
        for index, message in enumerate(messages):
            start = ends[-1] if ends else 0
            end = max(last.get(index, -1) + 1, start)
            if message.role == "assistant":
                stops = [i for i in range(start, end) if ids[i] in self.stop_token_ids]
                end = stops[-1] + 1 if stops else end
            ends.append(end)
        return ends

    def _seated(self, messages: Sequence[Message], *, at_start: bool) -> Sequence[Message]:
        """As the family takes them: some have a system message at the beginning only."""
        return later_system_as_user(messages, at_start=at_start) if self._seats_system_first else messages

    def _refuses_a_later_system_message(self) -> bool:
        system, user = Message("system", "s"), Message("user", "u")
        try:
            self.render([system, user, system, user])
        except TemplateRefused:
            return True
        return False

    def _find_opening(self) -> list[int]:
        """The generation prompt's tokens."""
        rendered = self.render([Message("user", "u")])
        return rendered.token_ids[rendered.spans[-1][1] :]

    def _answer_start(self, prefix: list[int]) -> int:
        """Where the last answer begins: after the last generation prompt."""
        opening = self._opening
        for start in range(len(prefix) - len(opening), -1, -1):
            if opening and prefix[start : start + len(opening)] == opening:
                return start + len(opening)
        return len(prefix)


class _LibraryTokenizer:
    """Our tokenizer with the methods that the library calls, named and shaped as transformers has them."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.eos_token_id = tokenizer.id_of(tokenizer.named.get("eos_token", ""))
        self.unk_token_id = tokenizer.id_of(tokenizer.named.get("unk_token", ""))
        self.all_special_tokens = list(tokenizer.special_texts)

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        encoded: Encoded = self._tokenizer.encode_with_offsets(text)
        return {"input_ids": encoded.token_ids, "offset_mapping": list(zip(encoded.starts, encoded.ends, strict=True))}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._tokenizer.id_of(tokens)
        return [self._tokenizer.id_of(token) for token in tokens]


def _create(tokenizer: Tokenizer, family: str, settings: dict[str, Any]) -> Any:
    if importlib.util.find_spec("renderers") is None:
        raise ModuleNotFoundError(
            f"renderer {family!r} comes from the package `renderers`; pip install renderers, or take 'generic'"
        )
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import config_from_name

    try:
        default: Any = config_from_name(family)
    except (KeyError, ValueError) as error:
        known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        raise ValueError(f"unknown renderer {family!r}; known: generic, {known}") from error
    try:
        return create_renderer(_LibraryTokenizer(tokenizer, family), type(default)(**settings))  # type: ignore[arg-type]
    except (AssertionError, ValueError) as error:
        raise ValueError(f"renderer {family!r} does not fit this model's tokenizer: {error}; take 'generic'") from error


def _refusing(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except (ValueError, TypeError, KeyError) as error:  # what the library raises for conversations it does not take
        raise TemplateRefused(str(error)) from error


def _tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    return [tool_as_dict(tool) for tool in tools] or None


def _as_written(raw: str) -> ToolCall | None:
    """The call with its arguments as the model spelled them, where the block is JSON."""
    start, end = raw.find("{"), raw.rfind("}")
    return parse_call(raw[start : end + 1]) if 0 <= start < end else None


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
