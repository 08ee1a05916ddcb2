"""A client project in this process: its script, and what its checks.py declares."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from swarmtune.config import ConfigError
from swarmtune.script import Script, ScriptConfig
from swarmtune.swarm_script import SwarmScript

TRAIN, CHECKS = "train.py", "checks.py"
GPU_LIBRARIES = ("torch", "ray", "vllm", "verl", "sglang", "deepspeed", "tensorflow", "jax")


class ProjectError(Exception):
    """What is wrong with a project and what to change, in a sentence."""


@dataclass(frozen=True, slots=True)
class Project:
    folder: Path
    script: Script
    config: ScriptConfig
    """With the script's defaults."""
    random_answer: Callable[..., Any] | None
    """(task, messages, rng) → what someone says who knows the form of an answer and nothing else."""
    good_answer: Callable[..., Any] | None
    """(task, messages) → an answer that deserves the full reward."""


def load(folder: Path) -> Project:
    """Import a project's train.py, and checks.py where it has one.

    Raises:
        ProjectError: they cannot be imported, or there is not exactly one Script.
    """
    sys.path.insert(0, str(folder))
    train = _import(folder / TRAIN)
    scripts = {id(value): name for name, value in vars(train).items() if isinstance(value, Script)}
    if not scripts and any(isinstance(value, SwarmScript) for value in vars(train).values()):
        raise ProjectError(
            f"{TRAIN} has a SwarmScript, which trains several models, and the check plays clients of one: try each "
            "role's reward on empty, constant and copied answers in a test of your own"
        )
    if len(scripts) != 1:
        found = f"{len(scripts)} of them ({', '.join(scripts.values())})" if scripts else "none"
        raise ProjectError(
            f"{TRAIN} must have exactly one module-level Script and has {found}: NAME = Script(name=…, tasks=…, "
            "rollout=…), with run(NAME) under `if __name__ == '__main__'`"
        )
    script: Script = getattr(train, next(iter(scripts.values())))
    try:
        config = script.resolve({})
    except ConfigError as error:
        raise ProjectError(f"the defaults of the Script in {TRAIN} are no configuration: {error}") from None
    checks = _import(folder / CHECKS) if (folder / CHECKS).is_file() else None
    return Project(folder, script, config, _function(checks, "random_answer"), _function(checks, "good_answer"))


def gpu_libraries() -> list[str]:
    """Those that this process has imported by now."""
    return [name for name in GPU_LIBRARIES if name in sys.modules]


class CountingRandom(random.Random):
    """A generator that notes what any was seeded with."""

    seeds: ClassVar[list[str]] = []

    def seed(self, a: Any = None, version: int = 2) -> None:
        CountingRandom.seeds.append(repr(a))
        super().seed(a, version)


def _import(path: Path) -> ModuleType:
    """A module under its file's name, as `python FILE` and imports among the project's files know it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = Path(error.filename or path).name
        raise ProjectError(f"{where}, line {error.lineno}: {error.msg}; repair the syntax") from None
    except ModuleNotFoundError as error:
        raise ProjectError(
            f"{where_of(error, path.parent)}: no module {error.name!r}: install it, or put {error.name}.py beside "
            f"{TRAIN}"
        ) from None
    except SystemExit as error:
        raise ProjectError(
            f"importing {path.name} ended the program ({error!r}): keep run(…) under `if __name__ == '__main__'`"
        ) from None
    except Exception as error:  # noqa: BLE001 - a project's code may raise anything
        raise ProjectError(
            f"importing {path.name} raised {type(error).__name__}: {error} ({where_of(error, path.parent)}): an import "
            "must only define things"
        ) from None
    return module


def where_of(error: BaseException, folder: Path) -> str:
    """The innermost line of the project that an exception passed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(folder):
            return f"{Path(frame.filename).relative_to(folder)}, line {frame.lineno}"
    return "outside the project's files"


def _function(module: ModuleType | None, name: str) -> Callable[..., Any] | None:
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise ProjectError(f"{CHECKS}: {name} must be a function")
    return found
