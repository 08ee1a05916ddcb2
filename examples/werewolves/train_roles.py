"""Trains a model for each of several roles or seats, on a server of its own each, in common games.

    python examples/werewolves/train_roles.py                                            # werewolf and seer
    python examples/werewolves/train_roles.py --set 'task.trained=["werewolf-1", "werewolf-2", "werewolf-3"]'
    python examples/werewolves/train_roles.py --server werewolf=http://a:10086 --server seer=http://b:10086
    python examples/werewolves/train_roles.py --set optim.lr=1e-6 --set seer.lora.rank=16

Each role is rewarded for its own side. Everybody without a model of their own is a fixed opponent, as in train.py.
"""

from __future__ import annotations

import werewolf_games
from pydantic import Field

from swarmtune.script import Script
from swarmtune.swarm_script import SwarmScript, run


class Roles(werewolf_games.Table):
    """As a table, with models of both sides to begin with."""

    trained: list[str] = Field(default=["werewolf", "seer"], min_length=1)


WEREWOLF_ROLES = SwarmScript(
    script=Script(
        name="werewolf_roles",
        parameters=Roles,
        tasks=werewolf_games.make_tasks,
        rollout=werewolf_games.rollout_of_roles,
        defaults=werewolf_games.DEFAULTS,
    ),
    roles=lambda table: table.trained,
)

if __name__ == "__main__":
    run(WEREWOLF_ROLES)
