"""The modules of the example, loaded by themselves: other examples have files of the same names."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "who_is_the_spy"
_NAMES = ("words", "prompts", "game", "house", "static_endpoint", "players", "agents", "mock_games", "train")


def _load() -> dict[str, ModuleType]:
    aside = {name: sys.modules.pop(name) for name in _NAMES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        return {name: importlib.import_module(name) for name in _NAMES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in _NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(aside)


_loaded = _load()
words, prompts, game, house = (_loaded[name] for name in ("words", "prompts", "game", "house"))
static_endpoint, players, agents = (_loaded[name] for name in ("static_endpoint", "players", "agents"))
mock_games, train = _loaded["mock_games"], _loaded["train"]

_COUNT = itertools.count()
Say = Callable[[str, Sequence[str]], str]


def dealt(*, players: int = 5, spies: int = 1, seed: int = 3, **rules: Any) -> Any:
    return game.deal(words.pairs()[0], players=players, spies=spies, seed=seed, rules=game.Rules(**rules))


def asked(say: Say) -> Any:
    """A player out of a plain function."""

    async def ask(question: str, choices: Sequence[str]) -> str:
        return say(question, choices)

    return ask


def play(dealt_game: Any, say: Say | Mapping[str, Say]) -> Any:
    """The winner; `say` plays every seat, or each has its own."""
    of_seat = say if isinstance(say, Mapping) else {seat.name: say for seat in dealt_game.seats}
    return asyncio.run(game.play(dealt_game, {name: asked(one) for name, one in of_seat.items()}))


def voting_for(name_of: Callable[[Sequence[str]], str]) -> Say:
    """Describes in words of its own, and votes by `name_of`(the names)."""
    return lambda question, choices: name_of(choices) if choices else "a{0} b{0} c{0}".format(next(_COUNT))
