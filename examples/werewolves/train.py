"""Trains one model that plays any set of roles of one side; everybody else is a fixed opponent. Reward: 1 for a win.

    python examples/werewolves/train.py                                          # the three werewolves, against no plan
    python examples/werewolves/train.py --set 'task.trained=["seer", "witch"]' --set task.opponent_url=https://…/v1
    python examples/werewolves/train.py --set eval.repeats=4                     # and the win rate afterwards

The key of the opponents' endpoint is read from the environment variable OPPONENT_API_KEY. Both sides at once, each with
a model of its own: train_roles.py. Win rates of either side: win_rates.py.
"""

from __future__ import annotations

import werewolf_games

from swarmtune.script import Script, run

WEREWOLVES = Script(
    name="werewolves",
    parameters=werewolf_games.Table,
    tasks=werewolf_games.shared_tasks,
    rollout=werewolf_games.shared_rollout,
    defaults=werewolf_games.DEFAULTS,
)

if __name__ == "__main__":
    run(WEREWOLVES)
