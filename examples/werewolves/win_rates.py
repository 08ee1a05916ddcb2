"""Win rates of the model that a running server trains: as the werewolves, and as the whole village.

    python examples/werewolves/win_rates.py --server http://127.0.0.1:10086 --games 50 [--opponent-url URL]

The games are evaluation episodes: they never train anything, and may run beside a training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import werewolf_games

from swarmtune import SwarmClient
from swarmtune.errors import SwarmError
from swarmtune.evaluation import Estimate

SIDES = {"werewolves": ["werewolf"], "village": ["villager", "seer", "witch", "hunter"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Win rates of a server's model, side by side.")
    parser.add_argument("--server", required=True, metavar="URL")
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1000, help="of the seatings; another one than the training's")
    parser.add_argument("--opponent-url", help="an OpenAI-compatible endpoint; default: opponents without a plan")
    parser.add_argument("--opponent-model", default="qwen3-235b-a22b")
    options = parser.parse_args(argv)
    try:
        for side, roles in SIDES.items():
            table = werewolf_games.Table(
                trained=roles,
                games=options.games,
                opponent_url=options.opponent_url,
                opponent_model=options.opponent_model,
            )
            rate = win_rate(options.server, table, options.seed)
            print(f"{side:10} wins {rate.value:.3f}  (95 % interval {rate.low:.3f} to {rate.high:.3f})")
    except (SwarmError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def win_rate(server: str, table: werewolf_games.Table, seed: int) -> Estimate:
    """Share of games won by the side of the table's trained roles, each seating once; Wilson interval."""
    tasks = werewolf_games.shared_tasks(table, seed)
    with SwarmClient(server) as swarm:
        return swarm.evaluate(tasks, werewolf_games.shared_rollout, seed=seed).pass_at[1]


if __name__ == "__main__":
    sys.exit(main())
