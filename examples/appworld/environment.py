"""What the agent's loop needs of an environment of apps; small_world.py and real_appworld.py each have one."""

from __future__ import annotations

from typing import Protocol


class EnvironmentBroken(RuntimeError):
    """The environment itself failed, not the agent: the episode is worth no reward, not even 0."""


class World(Protocol):
    """The apps of one person, and something this person wants done."""

    instruction: str

    def execute(self, code: str) -> str:
        """Run what the agent wrote; what it is told, errors included."""
        ...

    def completed(self) -> bool:
        """Whether the agent has said that it is done."""
        ...

    def score(self) -> float:
        """In [0, 1], by the state of the apps alone."""
        ...

    def close(self) -> None: ...
