"""Who filled the batches: for each step, the episodes of each client, read from a server's events.

    python shares.py --server http://127.0.0.1:10086 [--expect math --expect chat] [--last 3]

Exit status: 0 every expected client had episodes in each of the last steps; 1 one had none; 2 no server, no step yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from swarmtune import SwarmClient
from swarmtune.errors import SwarmError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--expect", action="append", default=[], metavar="NAME", help="a client that must have a part")
    parser.add_argument("--last", type=int, default=3, help="in each of so many last steps")
    asked = parser.parse_args()
    try:
        with SwarmClient(asked.server, api_key=os.environ.get("SWARMTUNE_KEY"), patience_s=5.0) as swarm:
            steps = by_step(swarm.events_so_far())
    except SwarmError as error:
        print(f"{asked.server}: {error}", file=sys.stderr)
        return 2
    if not steps:
        print("no step is done yet: `swarmtune pool` says what the first one waits for", file=sys.stderr)
        return 2
    names = sorted({name for _, counts, _ in steps for name in counts} | set(asked.expect))
    for step, counts, reward in steps:
        print(f"step {step:>3}  " + "  ".join(f"{name} {counts[name]:>3}" for name in names) + f"  reward {reward:.3f}")
    absent = [
        f"{name} has no episode in step {step}"
        for step, counts, _ in steps[-asked.last :]
        for name in asked.expect
        if not counts[name]
    ]
    print("\n".join(absent) or "good: every expected client had its part")
    return int(bool(absent))


def by_step(events) -> list[tuple[int, Counter[str], float]]:
    """(step, client → episodes admitted since the step before, mean reward)."""
    found, counts = [], Counter()
    for event in events:
        if event.kind == "episode" and event.data.get("outcome") == "admitted":
            counts[str(event.data.get("client") or "without a name")] += 1
        elif event.kind == "step":
            found.append((event.data["step"], counts, event.data["metrics"].get("reward/mean", 0.0)))
            counts = Counter()
    return found


if __name__ == "__main__":
    sys.exit(main())
