"""agent_roll: trains the civilians, who share one model, against static spies.

    python examples/who_is_the_spy/train.py                # on a CPU; results in runs/<date>-who-is-the-spy/
    SPY_OPPONENT_URL=https://… python examples/who_is_the_spy/train.py --config examples/who_is_the_spy/gpu.yaml

The spies are the endpoint in SPY_OPPONENT_URL; without one, the house player. `task.warm_up_steps` supervised steps on
mocked games come first; they count as steps.
"""

from __future__ import annotations

from agents import GameParameters, agent_roll, make_tasks
from mock_games import conversations
from pydantic import Field

from swarmtune import SwarmClient
from swarmtune.script import Script, ScriptConfig, run


class SpyTraining(GameParameters):
    """The games, and the supervised steps before them."""

    warm_up_steps: int = Field(default=10, ge=0)
    """Supervised steps on mocked games; 0 for none."""
    warm_up_batch: int = Field(default=16, ge=1)
    """Conversations a step."""
    warm_up_lr: float = Field(default=1e-4, gt=0.0)


def warm_up(swarm: SwarmClient, config: ScriptConfig) -> None:
    """The supervised steps that the server has not done yet; at least one step is left for the games."""
    settings: SpyTraining = config.parameters
    left = min(settings.warm_up_steps, config.steps - 1) - swarm.status().step
    if left <= 0:
        return
    needed = left * settings.warm_up_batch
    mocked = conversations(settings, games=needed, seed=config.seed)[:needed]
    swarm.warm_up(mocked, steps=left, batch_size=settings.warm_up_batch, lr=settings.warm_up_lr)


SCRIPT = Script(
    name="who-is-the-spy",
    parameters=SpyTraining,
    tasks=make_tasks,
    rollout=agent_roll,
    prepare=warm_up,
    defaults={
        "model": "smollm2-135m",
        "train_side_calls": True,  # each civilian has a system prompt of its own
        "steps": 20,
        "batch_tasks": 4,
        "repeats": 8,
        "parallel": 32,
        "sampling.max_tokens": 24,
        "engine.context_length": 1024,
        "engine.max_batch": 64,
        "optim.lr": 2e-5,
        "checkpoint.every_steps": 0,
        "task.players": 3,
        "task.kinds": 2,
    },
)

if __name__ == "__main__":
    run(SCRIPT)
