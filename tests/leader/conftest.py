"""Goals on the simulated client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from a3r.blueprint import load_blueprint
from a3r.goal import Goal, GoalLock

BASE = Path(__file__).resolve().parents[2] / "blueprints" / "simulated.yaml"


@pytest.fixture
def make_lock() -> Callable[..., GoalLock]:
    """`make_lock(config, levels=…, criterion=…, question=…, stats=…, budget=…)`: a goal on the simulated client."""

    def make(
        config: dict[str, Any] | None = None,
        levels: list[Any] | None = None,
        criterion: dict[str, Any] | None = None,
        question: dict[str, Any] | None = None,
        stats: dict[str, Any] | None = None,
        budget: dict[str, Any] | None = None,
    ) -> GoalLock:
        base, _ = load_blueprint(BASE)
        surface = {"sim.factor": "batch_size", "sim.threshold": 8.0, "sim.noise": 0.1, "total_training_steps": 2}
        asked = {
            "type": "min_that_still",
            "factor": "batch_size",
            "levels": levels or [1, 2, 4, 8, 16, 32, 64],
            "criterion": criterion or {"metric": "reward/mean", "at": {"last_k": 1}, "rule": {"at_least": 0.5}},
        }
        goal = Goal.model_validate(
            {
                "title": "test",
                "question": asked | (question or {}),
                "base": "simulated.yaml",
                "stats": stats or {},
                "budget": budget or {},
                "hitl": {"approve": "none"},
            }
        )
        return GoalLock(goal=goal, base=base.sealed(config=surface | (config or {})), source_sha256="0" * 64)

    return make
