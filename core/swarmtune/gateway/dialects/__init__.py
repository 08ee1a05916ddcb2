"""The wire formats, by the path under /v1 that speaks them."""

from __future__ import annotations

from swarmtune.gateway.dialect import Dialect
from swarmtune.gateway.dialects.anthropic import AnthropicDialect
from swarmtune.gateway.dialects.chat import ChatDialect
from swarmtune.gateway.dialects.completions import CompletionsDialect
from swarmtune.gateway.dialects.responses import ResponsesDialect

DIALECTS: dict[str, type[Dialect]] = {
    "chat/completions": ChatDialect,
    "completions": CompletionsDialect,
    "responses": ResponsesDialect,
    "messages": AnthropicDialect,
}
