"""How well placement packs, and what a leader costs.

`python benchmarks/scheduler.py` prints, for 1,000 simulated runs of mixed sizes over 8 hosts with 8 GPUs each, the
share of the best possible packing bound that the schedule reaches, the longest waits, and the time of one placement
decision; then the CPU time that a leader takes from a second while it follows 2 and 64 live runs and draws its table.
"""

from __future__ import annotations

import heapq
import io
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from a3r.placement import Request, Tenant, place

HOSTS, GPUS = 8, 8


@dataclass(frozen=True)
class Job:
    request: Request
    arrives_s: float
    takes_s: float


@dataclass(frozen=True)
class Outcome:
    efficiency: float
    """Lower bound of any schedule's makespan over this schedule's."""
    makespan_s: float
    longest_wait_s: float
    longest_gang_wait_s: float
    double_booked: int
    decision_ms: float
    """Mean time of one call of `place`."""


def workload(seed: int, count: int = 1000, over_s: float = 0.0, exact: bool = True) -> list[Job]:
    """Runs of 1, 2, 4 or 8 GPUs lasting 10 minutes to 6 hours, arriving over `over_s` seconds.

    Args:
        exact: runs take their `max_s`; otherwise 30 to 100 % of it.
    """
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        size = rng.choices([1, 2, 4, 8], weights=[40, 25, 20, 15])[0]
        max_s = rng.lognormvariate(8.3, 0.7)
        max_s = min(max(max_s, 600.0), 21600.0)
        takes = max_s if exact else max_s * rng.uniform(0.3, 1.0)
        request = Request(f"run{i:04d}", size, max_s, priority=rng.choices([0, 1, 2], weights=[2, 5, 3])[0])
        jobs.append(Job(request, rng.uniform(0.0, over_s), takes))
    return jobs


def simulate(jobs: list[Job]) -> Outcome:
    """Run the jobs through `place`, event by event."""
    pending = sorted(jobs, key=lambda j: j.arrives_s)
    by_run = {j.request.run: j for j in jobs}
    free = {f"h{h}": [f"h{h}/{g}" for g in range(GPUS)] for h in range(HOSTS)}
    running: list[tuple[float, str, str, tuple[str, ...], float]] = []
    waiting: dict[str, Job] = {}
    waits: dict[str, float] = {}
    at, calls, spent, double = 0.0, 0, 0.0, 0
    while pending or waiting or running:
        while pending and pending[0].arrives_s <= at:
            job = pending.pop(0)
            waiting[job.request.run] = job
        requests = [replace(j.request, waited_s=at - j.arrives_s) for j in waiting.values()]
        tenants = [Tenant(host, len(slots), latest - at) for _, _, host, slots, latest in running]
        began = time.perf_counter()
        placements = place(requests, free, tenants)
        spent, calls = spent + time.perf_counter() - began, calls + 1
        for placement in placements:
            job = waiting.pop(placement.run)
            waits[placement.run] = at - job.arrives_s
            double += sum(s not in free[placement.host] for s in placement.slots)
            free[placement.host] = [s for s in free[placement.host] if s not in placement.slots]
            latest = at + job.request.max_s
            heapq.heappush(running, (at + job.takes_s, placement.run, placement.host, placement.slots, latest))
        events = ([running[0][0]] if running else []) + ([pending[0].arrives_s] if pending else [])
        if not events:
            break
        at = max(at, min(events))
        while running and running[0][0] <= at:
            _, _, host, slots, _ = heapq.heappop(running)
            free[host] = sorted([*free[host], *slots])
    work = sum(j.takes_s * j.request.size for j in jobs)
    bound = max(work / (HOSTS * GPUS), max(j.arrives_s + j.takes_s for j in jobs))
    gangs = [waits[r] for r in waits if by_run[r].request.size == GPUS]
    return Outcome(bound / at, at, max(waits.values()), max(gangs), double, 1000 * spent / calls)


def leader_share(live_runs: int) -> float:
    """CPU seconds per second of a leader that follows so many runs and draws them, with its default pace."""
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "core"), str(root / "tests" / "study")]
    import campaigns

    from a3r import live, snapshot
    from a3r.attempts import Settings
    from a3r.executor import Life, Sight

    class StillRunning:
        def check(self, host): ...
        def start(self, handle, secrets): ...
        def look(self, handle):
            return Sight(Life.ALIVE, claim={})

        def open_view(self, handle, processes): ...
        def lost_view(self, handle):
            return False

    class ManySeeds(campaigns.SmallLeader):
        def think(self, goal, history):
            return self.stage(goal, 0, [1.0, 10.0], list(range(live_runs // 2)))

    with tempfile.TemporaryDirectory() as folder:
        maker = campaigns.Maker(Path(folder))
        directory = maker.create(hosts=maker.hosts(live_runs))
        settings = Settings(view=False, approve_all=True)
        study = maker.open(directory, settings, leader=ManySeeds())
        study.executors["local"] = StillRunning()  # type: ignore[assignment]  # what a leader asks for, without processes
        while len([a for a in study.open_attempts() if a["state"] == "RUNNING"]) < live_runs:
            study.tick()
        ticks, draws = round(1.0 / settings.tick_s), 1.0 / live.DRAW_S
        console = Console(file=io.StringIO(), force_terminal=True, width=120)
        began = time.process_time()
        for _ in range(20):
            for _ in range(ticks):
                study.tick()
            console.print(live.render(snapshot.take(directory, study.store)))
        share = (time.process_time() - began) / 20 * draws
        study.close()
    return share


def main() -> None:
    cases: dict[str, dict[str, Any]] = {
        "all at once, exact durations": dict(over_s=0.0, exact=True),
        "all at once, 30-100 % of max_s": dict(over_s=0.0, exact=False),
        "arriving over 18 h, 30-100 %": dict(over_s=18 * 3600.0, exact=False),
    }
    print(
        f"{'workload':34} {'of bound':>9} {'makespan h':>11} {'max wait h':>11}"
        f" {'8-GPU wait h':>13} {'ms/decision':>12}"
    )
    for name, options in cases.items():
        for seed in range(3):
            out = simulate(workload(seed, **options))
            print(
                f"{name:34} {out.efficiency:9.3f} {out.makespan_s / 3600:11.1f} {out.longest_wait_s / 3600:11.1f} "
                f"{out.longest_gang_wait_s / 3600:13.1f} {out.decision_ms:12.2f}"
            )
    for live_runs in (2, 64):
        print(f"leader with {live_runs} live runs: {100 * leader_share(live_runs):.2f} % of one core")


if __name__ == "__main__":
    main()
