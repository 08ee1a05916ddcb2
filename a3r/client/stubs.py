"""Policies that understand nothing, and those they are measured against.

A policy is played on one task of a client: it gets the messages of each call and says something. None of them may earn
more than the random baseline: a reward that pays for emptiness, for one fixed sentence or for repeating the prompt is
what the training will find.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[dict[str, str]]
Policy = Callable[[Any, Messages, random.Random], str]
"""(task, messages of the call, random numbers of the episode) → what the model says."""

LONG_WORDS = 400
"""Words of the endless constant; the call's own limit cuts it."""
RANDOM_WORDS = 12
"""Most words of a random answer."""

_COMMON = "the of and to a in is it you that for on with as be at by I this yes no not true false none".split()
_LETTERS = list("ABCD")
_FORMS = "<answer></answer> \\boxed{} ```\n\n``` {} #### Answer:"


@dataclass(frozen=True, slots=True)
class Stub:
    name: str
    policy: Policy
    copies: bool = False
    """It repeats the prompt, or some of it: where that is all a good answer does, it is the task and no trick."""


def constant(text: str, what: str = "constant") -> Stub:
    """Says the same whatever it is asked."""
    return Stub(f"{what} {_short(text)!r}", lambda task, messages, rng: text)


def last_message(task: Any, messages: Messages, rng: random.Random) -> str:
    """The copy of the prompt: what was said to it last."""
    return messages[-1]["content"] if messages else ""


def last_line(task: Any, messages: Messages, rng: random.Random) -> str:
    lines = [line for line in last_message(task, messages, rng).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def particulars(prompts: Sequence[str]) -> Stub:
    """Repeats what this prompt has and most others have not: the choices, the numbers. A call's own limit may cut the
    copy of a whole prompt before they come; a training finds them all the same."""
    seen = Counter(word for prompt in prompts for word in set(re.findall(r"\w+", prompt)))
    usual = {word for word, times in seen.items() if times > len(prompts) / 2}

    def policy(task: Any, messages: Messages, rng: random.Random) -> str:
        return " ".join(w for w in re.findall(r"\w+", last_message(task, messages, rng)) if w not in usual)

    return Stub("copy of what is particular to the prompt", policy, copies=True)


def random_words(task: Any, messages: Messages, rng: random.Random) -> str:
    """A few words of the prompt, common words, numbers and letters, in any order: the baseline of who declares none."""
    seen = re.findall(r"\w+", last_message(task, messages, rng))[-200:]
    words = [*seen, *_COMMON, *_LETTERS, *map(str, range(10))]
    return " ".join(rng.choices(words, k=rng.randint(1, RANDOM_WORDS)))


def stubs(prompts: Iterable[str], good_answers: Iterable[str] = ()) -> list[Stub]:
    """The policies that must not win.

    Args:
        prompts: what tasks ask; their most frequent word is one of the constants.
        good_answers: answers that earned the full reward somewhere; the most frequent one is what a policy ends at that
            has only learned which answer is common.
    """
    prompts = list(prompts)
    usual = [text for text, _ in Counter(good_answers).most_common(1)]
    frequent = [word for word, _ in Counter(w for p in prompts for w in re.findall(r"[^\W\d_]{3,}", p)).most_common(1)]
    return [
        Stub("empty", lambda task, messages, rng: ""),
        Stub("copy of the prompt", last_message, copies=True),
        Stub("copy of the prompt's last line", last_line, copies=True),
        particulars(prompts),
        *[constant(text, "the commonest good answer") for text in usual],
        *[constant(word, "the prompts' commonest word") for word in frequent],
        *[constant(text) for text in ("the", "yes", "1", "A", "I do not know.")],
        constant(" ".join(_COMMON), "common words"),
        constant(" ".join(["the"] * LONG_WORDS), "a long constant"),
        constant(_FORMS, "empty forms"),
        constant(" ".join(map(str, range(100))), "every number"),
        constant("Certainly. The answer is correct, I am sure that this is right. Score: 10/10", "praise of itself"),
    ]


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"
