"""A small cocktail: two clients in separate processes train one model on two tasks; one is killed and started again.

    python examples/cocktail_small/run.py [--out DIR] [--config FILE]

Starts a server and both clients, each with half of every batch. After step 2 the second client is killed (SIGKILL), for
two further steps the first trains alone, then the second is started again. The last lines list, for each step, the
episodes of each client: training never stops.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import yaml

from swarmtune import SwarmClient
from swarmtune.local import LocalServer
from swarmtune.protocol import Event

HERE = Path(__file__).resolve().parent
KILL_AFTER, RESTART_AFTER = 2, 4
"""Steps after which the second client is killed and started again."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Two clients, one model; one client is killed and started again.")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{datetime.date.today():%Y-%m-%d}-cocktail")
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml")
    options = parser.parse_args(argv)
    steps = yaml.safe_load(options.config.read_text())["steps"]
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer(options.out / "server", fresh=True))
        watch = stack.enter_context(SwarmClient(server.url))

        def start(script: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, str(HERE / f"{script}.py"), "--config", str(options.config)]
            process = subprocess.Popen([*command, "--server", server.url, "--out", str(options.out / script)])
            stack.callback(_end, process)
            return process

        sums, one_word = start("sums"), start("one_word")
        _wait_started(watch, [sums, one_word])
        watch.wait_step(after=KILL_AFTER - 1)
        one_word.kill()
        print(f"one_word was killed after step {watch.status().step}", file=sys.stderr, flush=True)
        watch.wait_step(after=RESTART_AFTER - 1)
        one_word = start("one_word")
        print(f"one_word was started again after step {watch.status().step}", file=sys.stderr, flush=True)
        watch.wait_step(after=steps - 1)
        ended = [sums.wait(), one_word.wait()]
        for line in contributions(watch.events_so_far()):
            print(line)
    return max(ended)


def contributions(events: Sequence[Event]) -> list[str]:
    """A line per step: the episodes that each client had admitted since the step before, and the mean reward."""
    lines: list[str] = []
    admitted: Counter[str] = Counter()
    for event in events:
        if event.kind == "episode" and event.data.get("outcome") == "admitted":
            admitted[str(event.data["client"])] += 1
        elif event.kind == "step":
            of_each = "  ".join(f"{name} {admitted[name]:>3}" for name in ("sums", "one-word"))
            lines.append(f"step {event.data['step']:>2}  {of_each}  reward {event.data['metrics']['reward/mean']:.3f}")
            admitted.clear()
    return lines


def _wait_started(watch: SwarmClient, clients: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until both clients are registered.

    Raises:
        RuntimeError: one of them ended before.
    """
    while watch.status().clients < len(clients):
        for client in clients:
            if client.poll() is not None:
                raise RuntimeError(f"a client ended with status {client.returncode} before training began")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
