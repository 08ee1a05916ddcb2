"""What both clients do around their task: join the training, feed it their share of each step, and say goodbye."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmtune import SwarmClient


def run(name: str, tasks: Sequence[Any], rollout: Callable[..., Any]) -> None:
    """Take part under `name` until the training has done its steps."""
    logging.basicConfig(format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=f"The client {name} of the cocktail.")
    parser.add_argument("--server", required=True, metavar="URL")
    parser.add_argument(
        "--config", required=True, type=Path, help="JSON: train (a TrainConfig), steps, parallel, shares"
    )
    options = parser.parse_args()
    config = json.loads(options.config.read_text(encoding="utf-8"))
    with SwarmClient(options.server, name=name, share=config["shares"][name]) as swarm:
        swarm.start(config["train"])
        swarm.train(tasks, rollout, steps=config["steps"], parallel=config["parallel"], progress=False)
