"""Tokenizers and chat templates small enough to read, for tests: no download, no model."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from swarmtune.rendering.generic import GenericRenderer
from swarmtune.rendering.template import ChatTemplate
from swarmtune.rendering.tokenizer import Tokenizer

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Strips thinking before the last user message, as Qwen3's does."""

REORDERING = THINKING.replace("arguments | tojson }}", "arguments | tojson(sort_keys=True) }}").replace(
    " and loop.index0 > ns.last", ""
)
"""Writes tool arguments with sorted keys; keeps thinking."""

ONE_SYSTEM = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Refuses a second system message, trims contents."""

MERGING_TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Puts consecutive tool messages into one user turn."""

PLAIN = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
"""No special tokens at all."""

ALTERNATING = """\
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Takes no system message, and only turns that alternate."""

COUNTING = CHATML.replace("message.role + '\\n'", "message.role + ' ' + (loop.length | string) + '\\n'")
"""Writes the number of messages into each: every prompt is rewritten by the next."""

INDEXED = CHATML.replace(
    "message.role + '\\n'", "message.role + (' ' ~ loop.index if message.role != 'assistant' else '') + '\\n'"
)
"""Numbers the messages that are not the model's."""

TEMPLATES = {
    "indexed": INDEXED,
    "chatml": CHATML,
    "thinking": THINKING,
    "reordering": REORDERING,
    "one_system": ONE_SYSTEM,
    "merging_tools": MERGING_TOOLS,
    "plain": PLAIN,
    "alternating": ALTERNATING,
    "counting": COUNTING,
}

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MERGES = (("a", "n"), ("an", "s"), ("e", "r"), ("i", "n"), ("t", "h"), ("th", "e"), ("Ċ", "Ċ"))


@cache
def tiny_tokenizer() -> Tokenizer:
    """Bytes and a few merges, so that one text has several tokenizations; the special tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(alphabet)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return Tokenizer(fast, {"eos_token": "<|im_end|>", "unk_token": None})


@cache
def tiny_renderer(template: str) -> GenericRenderer:
    return GenericRenderer(tiny_tokenizer(), ChatTemplate(TEMPLATES[template], {}), name=template)
