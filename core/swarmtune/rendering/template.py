"""A model's chat template, rendered to text as the library `transformers` renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarmtune.rendering.renderer import TemplateRefused
from swarmtune.rendering.tokenizer import read_json
from swarmtune.types import Message, ToolSpec

TOOL_PROMPT = """# Tools

You may call these functions:
<tools>
{tools}
</tools>

To call one, answer with a JSON object in tags:
<tool_call>
{{"name": "<function name>", "arguments": {{<arguments>}}}}
</tool_call>"""
"""What a model whose template knows no tools is told about them, in the form that most open models were taught."""


class ChatTemplate:
    """One Jinja chat template with the special tokens it may name.

    A template that knows no tools gets them anyway: described in the system message (in the first user message where
    the template takes no system message), calls as `<tool_call>` text of the assistant, results as user messages. One
    that takes a system message only at the beginning gets later ones, which coding agents send, as user messages.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        system, user = Message("system", "s"), Message("user", "u")
        self.takes_system = self._accepts(system, user)
        self._seats_system_first = self.takes_system and not self._accepts(system, user, system, user)

    @classmethod
    def load(cls, folder: Path, special_tokens: dict[str, str]) -> ChatTemplate:
        """Read `chat_template.jinja`, else the entry in tokenizer_config.json.

        Raises:
            FileNotFoundError: the folder has neither.
        """
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special_tokens)
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            by_name = {entry["name"]: entry["template"] for entry in source}
            source = by_name.get("default")
        if not isinstance(source, str):
            raise FileNotFoundError(
                f"{folder}: no chat template; add chat_template.jinja, or take an instruct model that has one"
            )
        return cls(source, special_tokens)

    def text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = False
    ) -> str:
        """The conversation as the model reads it.

        Raises:
            TemplateRefused: with the template's own words.
        """
        if not self.knows_tools:
            messages, tools = self._without_tools(messages, tools), ()
        if self._seats_system_first:
            messages = later_system_as_user(messages)
        try:
            return self._template.render(
                messages=[message_as_dict(message) for message in messages],
                tools=[tool_as_dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:  # a template trips over a message with a TypeError
            raise TemplateRefused(str(error)) from error

    def _accepts(self, *messages: Message) -> bool:
        try:
            self._template.render(messages=[message_as_dict(m) for m in messages], tools=None, **self._special_tokens)
        except (jinja2.TemplateError, TypeError):
            return False
        return True

    def _without_tools(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        out: list[Message] = []
        in_results = False
        for message in messages:
            if message.role == "tool":
                result = f"<tool_response>\n{message.content}\n</tool_response>"
                if in_results:  # templates that want turns to alternate take one message, not two
                    result = f"{out.pop().content}\n{result}"
                out.append(Message("user", result))
            elif message.tool_calls:
                calls = [f"<tool_call>\n{_call_text(c.name, c.arguments)}\n</tool_call>" for c in message.tool_calls]
                content = "\n".join([message.content, *calls] if message.content else calls)
                out.append(Message("assistant", content, reasoning=message.reasoning))
            else:
                out.append(message)
            in_results = message.role == "tool"
        return self._with_tool_prompt(out, tools) if tools else out

    def _with_tool_prompt(self, messages: list[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        described = "\n".join(json.dumps(tool_as_dict(tool), ensure_ascii=False) for tool in tools)
        prompt = TOOL_PROMPT.format(tools=described)
        role = "system" if self.takes_system else "user"
        if messages and messages[0].role == role:
            first, *rest = messages
            content = f"{first.content}\n\n{prompt}" if role == "system" else f"{prompt}\n\n{first.content}"
            return [Message(role, content), *rest]
        return [Message(role, prompt), *messages]


def later_system_as_user(messages: Sequence[Message], *, at_start: bool = True) -> list[Message]:
    """System messages as user messages, but for one that opens the conversation; `at_start`: whether `messages` do."""
    return [
        replace(message, role="user") if message.role == "system" and (index or not at_start) else message
        for index, message in enumerate(messages)
    ]


def _call_text(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments.strip() or "{}"}}}'


def message_as_dict(message: Message) -> dict[str, Any]:
    """A message in the form that chat templates read; absent fields are left out, since templates test for them."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    return out


def _arguments(text: str) -> Any:
    """Templates expect an object; what is not one stays text."""
    try:
        value = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text


def tool_as_dict(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the form that chat templates read."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model writes; here it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
