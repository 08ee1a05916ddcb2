"""A client that is killed frees its places when its short lease ends; one that promised nothing keeps the long one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from swarmtune import Swarm, SwarmClient
from swarmtune.local import LocalServer
from swarmtune.protocol import EpisodeState
from tests.client.client_parts import ask, scripted, until

CORE = Path(__file__).parents[2] / "core"
HOLDS = """
import sys, time
from swarmtune import SwarmClient
client = SwarmClient(sys.argv[1])
print(client.claim("held").episode_id, flush=True)
time.sleep(600)
"""


def test_a_client_that_is_killed_frees_its_place_when_its_heartbeats_stop(
    swarm: Swarm, pair: tuple[LocalServer, LocalServer]
) -> None:
    white = swarm["white"]
    white.start(
        scripted(
            batch_tasks=1,
            repeats=1,
            **{"batching.heartbeat_lease_s": 2.0, "algorithm.advantage": "reinforce_plus_plus"},
        )
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, pair[0].url],
        env=os.environ | {"PYTHONPATH": str(CORE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    episode_id = holder.stdout.readline().strip()
    claimed_at = time.monotonic()
    until(lambda: time.monotonic() > claimed_at + 4, "twice the lease has passed")
    view = httpx.get(f"{pair[0].url}/v1/episodes/{episode_id}").json()
    assert view["state"] == EpisodeState.CLAIMED, "heartbeats keep it"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with white.episode("held", wait_s=60) as episode:
        ask(episode)
        episode.end(1.0)
    view = httpx.get(f"{pair[0].url}/v1/episodes/{episode_id}").json()
    assert (view["state"], view["reason"]) == (EpisodeState.EXPIRED, "no call and no heartbeat for 2 s")


def test_the_lease_is_short_for_who_promises_heartbeats_and_long_for_who_does_not(
    swarm: Swarm, pair: tuple[LocalServer, LocalServer]
) -> None:
    swarm["white"].start(scripted(batch_tasks=4))
    agent = httpx.post(f"{pair[0].url}/v1/episodes", json={"task_id": "a"}).json()
    assert agent["lease_s"] == 900
    with SwarmClient(pair[0].url) as client:
        assert client.claim("b").grant.lease_s == 60
        assert client.claim("c", lease_s=400).grant.lease_s == 400
