"""Renderer for any chat template: continues a conversation with the suffix of the template's own text.

To go on from sampled ids it renders the conversation twice as text, up to the answer and beyond it, and encodes only
what comes after the answer. Where the longer text does not begin with the shorter one, the template rewrites history:
None. What comes before the last user message is left out of both and long texts are stood in for, so the cost does not
grow with the conversation; templates for which that would give other text are found out when the renderer is made, and
rendered in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmtune.rendering.parsing import parse_answer
from swarmtune.rendering.renderer import Rendered, TemplateRefused
from swarmtune.rendering.template import ChatTemplate
from swarmtune.rendering.tokenizer import TextStream, Tokenizer, read_json
from swarmtune.types import Message, ToolCall, ToolSpec

_ANSWER = "\u22b3answer\u22b2"
_THOUGHT = "\u22b3thought\u22b2"
"""Stand-ins for an answer's content and reasoning; what comes after them in the rendered text closes the turn."""


class GenericRenderer:
    """Renders with a Hugging Face folder's tokenizer and chat template.

    Args:
        end_token_ids: tokens that the model's own configuration says end an answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, name: str = "generic", end_token_ids: Sequence[int] = ()
    ) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._template = template
        self._end_text = self._find_end_text()
        end_id = tokenizer.special_texts.get(self._end_text)
        ends = [*end_token_ids, *([end_id] if end_id is not None else [])]
        if not ends and (eos := tokenizer.id_of(tokenizer.named.get("eos_token", ""))) is not None:
            ends = [eos]
        self.stop_token_ids = tuple(dict.fromkeys(ends))
        self._opens_reasoning = self._find_opens_reasoning()
        self._condenses = True
        self._condenses = self._condensing_changes_nothing()

    @classmethod
    def load(cls, folder: Path) -> GenericRenderer:
        """Read tokenizer.json, chat template and end tokens of a model folder.

        Raises:
            FileNotFoundError: the tokenizer or the chat template is missing.
        """
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer.named)
        config = read_json(folder / "generation_config.json") or read_json(folder / "config.json")
        return cls(tokenizer, template, end_token_ids=as_ids(config.get("eos_token_id")))

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = True
    ) -> Rendered:
        text = self._template.text(messages, tools, generation_prompt=generation_prompt)
        cuts = self._cuts(text, [], messages, tools)
        token_ids, ends = self._tokenizer.encode_cut(text, cuts)
        if not generation_prompt and ends:
            ends[-1] = len(token_ids)
        return Rendered(token_ids, spans_ending_at(ends))

    def extend(
        self,
        prefix_ids: Sequence[int],
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        keep: bool = False,
    ) -> Rendered | None:
        answered = history[-1].role == "assistant"
        prompt, answer = (history[:-1], history[-1]) if answered else (history, None)
        if self._condenses:
            prompt, tools = _condensed(prompt), _condensed_tools(tools)
        if answer is not None:
            answer = _stand_in(answer)
        if keep:
            prompt = [replace(message, reasoning=None) for message in prompt]
            answer = replace(answer, reasoning=None) if answer is not None else None
        before = [*prompt, answer] if answer is not None else [*prompt]
        whole = self._template.text([*before, *new], tools, generation_prompt=True)
        start = self._end_of_prefix(whole, prompt, answer, tools, keep)
        if start is None:
            return None
        cuts = [max(cut - start, 0) for cut in self._cuts(whole, before, new, tools)]
        return self._encode_suffix(whole[start:], cuts, prefix_ids[-1] if answered and len(prefix_ids) else None)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        ids = token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_token_ids else token_ids
        return parse_answer(self.decode(ids), in_reasoning=self._opens_reasoning, tools=bool(tools))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(token_ids, special=special)

    def stream(self) -> TextStream:
        return self._tokenizer.stream()

    # where one thing ends in the template's text

    def _end_of_prefix(
        self,
        whole: str,
        prompt: Sequence[Message],
        answer: Message | None,
        tools: Sequence[ToolSpec],
        keep: bool,
    ) -> int | None:
        """Character of `whole` at which what is not yet in the prefix begins; None where the prefix is not in it."""
        asked = self._template.text(prompt, tools, generation_prompt=True)
        if answer is None:
            return len(asked) if whole.startswith(asked) else None
        if whole.startswith(asked):
            after = len(asked)
        elif keep:
            after = len(_common_prefix(asked, whole))
        else:
            return None
        if answer.reasoning is not None:
            if (shown := whole.find(answer.reasoning, after)) < 0:
                return None
            after = shown + len(answer.reasoning)
        if answer.content:
            if (shown := whole.find(answer.content, after)) < 0:
                return None
            after = shown + len(answer.content)
        if self._end_text:
            close = whole.find(self._end_text, after)
            return close if close >= 0 else None
        if not answer.tool_calls:
            return after
        closed = self._template.text([*prompt, answer], tools)
        return len(closed) if whole.startswith(closed) else None

    def _cuts(
        self, whole: str, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int]:
        """For each message, the character of `whole` at which it ends."""
        cuts: list[int] = []
        for count in range(1, len(messages) + 1):
            cut = self._cut(whole, [*before, *messages[:count]], tools)
            cuts.append(max(cut, cuts[-1] if cuts else 0))
        return cuts

    def _cut(self, whole: str, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> int:
        try:
            part = self._template.text(messages, tools)
            if not whole.startswith(part):  # thinking that only the last answer shows
                part = self._template.text([replace(message, reasoning=None) for message in messages], tools)
        except TemplateRefused:  # not a whole conversation yet: its tokens go to the next message
            return 0
        if not whole.startswith(part):
            part = _common_prefix(part, whole)
        if messages[-1].role == "assistant" and self._end_text:
            close = part.rfind(self._end_text)
            return close + len(self._end_text) if close >= 0 else len(part)
        return len(part)

    def _encode_suffix(self, text: str, cuts: Sequence[int], last_id: int | None) -> Rendered:
        """Tokens of `text`, which follows the end mark of a turn; the mark itself is dropped where it was sampled.

        Encoding starts at a mark, since many tokenizers treat the head of a text in their own way.
        """
        mark = self._end_text
        lead = mark if mark and not text.startswith(mark) else ""
        token_ids, ends = self._tokenizer.encode_cut(lead + text, [cut + len(lead) for cut in cuts])
        sampled = bool(mark) and not lead and last_id in self.stop_token_ids
        skip = 1 if lead or sampled else 0
        return Rendered(token_ids[skip:], spans_ending_at([max(end - skip, 0) for end in ends]))

    # what is learned of the template when the renderer is made

    def _find_end_text(self) -> str:
        """The special token with which the template ends an assistant message; "" where it has none."""
        for opening in ([Message("user", "u")], []):
            try:
                text = self._template.text([*opening, Message("assistant", _ANSWER)])
            except TemplateRefused:
                continue
            after = text.partition(_ANSWER)[2].lstrip()
            marks = [mark for mark in self._tokenizer.special_texts if mark and after.startswith(mark)]
            return max(marks, key=len, default="")
        return ""

    def _find_opens_reasoning(self) -> bool:
        """Whether the generation prompt already opens the thinking."""
        try:
            text = self._template.text([Message("user", "u")], generation_prompt=True)
        except TemplateRefused:
            return False
        return text.rstrip().endswith("<think>")

    def _condensing_changes_nothing(self) -> bool:
        return all(self._condenses_truly(history, new, tools) for history, new, tools in _probes())

    def _condenses_truly(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
        outcomes: list[Any] = []
        for condenses in (True, False):
            self._condenses = condenses
            try:
                outcomes.append(self.extend([], history, new, tools))
            except TemplateRefused:
                outcomes.append(TemplateRefused)
        return outcomes[0] == outcomes[1]


def _condensed(prompt: Sequence[Message]) -> list[Message]:
    """What a template can see of a prompt that matters for what comes after it.

    A system message, the last user message, and of the turns since then one that thought and the last; short texts
    stand in for theirs.
    """
    head = [Message("system", "s")] if prompt and prompt[0].role == "system" else []
    last_user = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i].role == "user"), None)
    if last_user is None:
        return list(prompt)
    turns = [i for i in range(last_user + 1, len(prompt)) if prompt[i].role == "assistant"]
    thinking = next((i for i in reversed(turns) if prompt[i].reasoning is not None), None)
    kept: list[int] = sorted({*turns[-1:], *([thinking] if thinking is not None else [])})
    out = [*head, Message("user", "u")]
    for start in kept:
        end = start + 1
        while end < len(prompt) and prompt[end].role not in ("assistant", "user"):
            end += 1
        out.append(_stand_in(prompt[start]))
        out.extend(replace(message, content="r") for message in prompt[start + 1 : end])
    if not kept:
        out.extend(replace(message, content="r") for message in prompt[last_user + 1 :])
    return out


def _condensed_tools(tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    return [ToolSpec(tools[0].name, "d", {"type": "object", "properties": {}})] if tools else []


def _stand_in(answer: Message) -> Message:
    return replace(
        answer,
        content=_ANSWER if answer.content else "",
        reasoning=_THOUGHT if answer.reasoning is not None else None,
        tool_calls=tuple(replace(call, arguments="{}") for call in answer.tool_calls),
    )


def _probes() -> list[tuple[list[Message], list[Message], list[ToolSpec]]]:
    """Conversations on which condensed and full rendering are compared."""
    system, user = Message("system", "Be brief."), Message("user", "What is it?")
    call = Message("assistant", "I look.", tool_calls=(ToolCall("call00001", "look", '{"at": 1}'),))
    result = Message("tool", "It is red.", tool_call_id="call00001", name="look")
    said, thought = Message("assistant", "Red."), Message("assistant", "Red.", reasoning="I saw it.")
    look = [ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "integer"}}})]
    thinking_call = replace(call, reasoning="I should look.")
    return [
        ([user, said], [user], []),
        ([system, user, said, user, said], [user], []),
        ([user, thought, user, said], [user], []),
        ([system, user, thought, user, thought], [user], []),
        ([user, call, result, said], [user], look),
        ([system, user, call, result, call], [result], look),
        ([user, call, result, call, result, call], [result], look),
        ([user, thinking_call, result, call], [result], look),
        ([system, user, thought, user, thinking_call, result, call, result, thinking_call], [result], look),
        ([user, thinking_call, result, call, result, thought], [user], look),
        ([system, user, said, user], [said, user], []),
    ]


def spans_ending_at(ends: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 5] → [(0, 3), (3, 5)]."""
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def _common_prefix(one: str, other: str) -> str:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return one[:low]


def as_ids(value: Any) -> list[int]:
    """`eos_token_id` of a configuration: absent, one id, or several."""
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]
