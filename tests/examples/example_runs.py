"""What the tests of the examples share: loading an example, and what a training of one left."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from swarmtune.protocol import Event

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Trained:
    """What one run of an example left."""

    status: int
    metrics: list[dict[str, Any]]
    events: list[Event]
    out: Path

    def outcomes(self) -> list[str]:
        return [str(event.data.get("outcome")) for event in self.events if event.kind == "episode"]


Train = Callable[..., Trained]
"""`train(SCRIPT, "module:function", {"steps": 2, …})`: the example's own command line, on the scripted engine."""


@dataclass(frozen=True)
class TrainedRoles:
    status: int
    metrics: dict[str, list[dict[str, Any]]]
    """Role → its steps."""
    out: Path


TrainRoles = Callable[..., TrainedRoles]
"""`train_roles(SWARM_SCRIPT, "module:function", ["a", "b"], {…})`: an example with two models, likewise."""


def load(example: str, script: str = "train") -> ModuleType:
    """The script as a module of a name of its own: they are all called train.py."""
    path = EXAMPLES / example / f"{script}.py"
    spec = importlib.util.spec_from_file_location(f"{example}_{script}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where pydantic looks up the types of its models
    spec.loader.exec_module(module)
    return module
