"""Whether an answer is right. math-verify runs in a process of its own: it stops long computations by a signal, which
works in no thread, and a computation that no signal stops must not hold up the agents.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any

from swarmtune.config import ConfigError

_PATIENCE_S = 5
_LIMIT_S = 60.0


def check_judge(judge: str) -> None:
    """Raises:
    ConfigError: the package that it needs is missing.
    """
    if judge == "math-verify" and find_spec("math_verify") is None:
        raise ConfigError("answers of this data set are judged by math-verify: pip install 'a3r[examples]'")


def score(task: Mapping[str, Any], answer: str) -> float:
    """What `answer` is worth, in [0, 1]: only what stands after the last "Answer:" counts where there is one."""
    said = answer.rpartition("Answer:")[2].strip()
    kind, _, name = task["judge"].partition(":")
    if kind == "gym":
        return _gym_score(name, task["entry"], said)
    if kind == "math-verify":
        return float(_judges().submit(verified, task["answer"], said).result(_LIMIT_S))
    return float(last_number(said) == float(task["answer"]))


def last_number(text: str) -> float | None:
    """The last one, so that listing many does not pay."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def verified(expected: str, said: str) -> bool:
    """Whether both are the same mathematics; what math-verify cannot tell in time is not. For a main thread only."""
    from math_verify import parse, verify

    gold = parse(f"${expected}$", parsing_timeout=_PATIENCE_S)
    found = parse(said, parsing_timeout=_PATIENCE_S)
    return bool(verify(gold, found, timeout_seconds=_PATIENCE_S))


def _gym_score(name: str, entry: Mapping[str, Any], said: str) -> float:
    from reasoning_gym import get_score_answer_fn

    scorer: Any = get_score_answer_fn(name)
    return float(scorer(said, entry))


@cache
def _judges() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
