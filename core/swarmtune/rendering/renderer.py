"""The renderer contract: canonical messages ↔ token ids, for one model.

The gateway renders every prompt itself, so the engine sees token ids only. A renderer never re-encodes what the model
sampled: `extend` continues a conversation from the sampled ids. Siblings: `generic.py` (any chat template), `known.py`
(model families the library `renderers` knows). `load_renderer` in `rendering/load.py` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmtune.types import Message, ToolSpec


class TemplateRefused(ValueError):
    """The model's chat template does not take this conversation; the message says why, in the template's words."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids, and for each message the half-open range [start, end) of its tokens, template marks included.

    Ranges cover all ids in order: text before the first message belongs to the first, the generation prompt to none. An
    assistant message ends with its end-of-turn token; marks after that token belong to the next message.
    """

    token_ids: list[int]
    spans: list[tuple[int, int]]


class TextStream(Protocol):
    """Incremental decoding of one answer; never emits half a character, never takes a character back."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that has become certain with these tokens."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Renderer(Protocol):
    name: str
    stop_token_ids: tuple[int, ...]
    """Tokens that end an assistant turn."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = True
    ) -> Rendered:
        """Tokens of a whole conversation, from nothing.

        Raises:
            TemplateRefused
        """
        ...

    def extend(
        self,
        prefix_ids: Sequence[int],
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        keep: bool = False,
    ) -> Rendered | None:
        """Tokens to append to `prefix_ids` so that the conversation goes on with `new` and asks for the next answer.

        `history` is the canonical form of `prefix_ids`. Where it ends with an assistant message, `prefix_ids` is a
        prompt plus the answer sampled to it, and the turn is closed first if the answer stopped short of its end token.
        Where it ends with another role, `prefix_ids` is a prompt with its generation prompt, and `new` begins with an
        assistant message. Spans are those of `new` within the appended tokens.

        None when the template would rewrite tokens of `prefix_ids` (such as stripping thinking) or cannot tell: the
        caller renders anew and the tree forks. With `keep`, sampled tokens stay whatever the template would do to them.

        Raises:
            TemplateRefused
        """
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        """The assistant message an answer means: content, reasoning, tool calls (ids left to the gateway: "")."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text, no special tokens added: for /v1/completions."""
        ...

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str: ...

    def stream(self) -> TextStream: ...
