"""Read a training's numbers and name the known symptoms in them, each with its evidence and what to try first.

    python symptoms.py runs/2026-01-01-mine          # the folder of a training script: metrics.jsonl, events.jsonl
    python symptoms.py --server http://127.0.0.1:10086

Exit status: 0 no known symptom; 1 some; 2 nothing to read. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder with metrics.jsonl and events.jsonl")
    parser.add_argument("--last", type=int, default=5, help="steps that count as now")
    parser.add_argument("--server", help="address of a swarm server; key in SWARMTUNE_KEY where it has keys")
    asked = parser.parse_args()
    try:
        rows, events, config = from_server(asked.server) if asked.server else from_folder(asked.run or Path("."))
    except (OSError, ValueError, KeyError) as error:
        print(f"nothing to read: {error}", file=sys.stderr)
        return 2
    found = [*of_events(events), *of_steps(rows, config, asked.last)]
    for name, evidence, first in found:
        print(f"{name}: {evidence}\n    first: {first}")
    if not found:
        steps = (
            f"{len(rows)} steps, reward/mean {rows[-1].get('reward/mean', float('nan')):.3f}" if rows else "no step yet"
        )
        print(f"no known symptom ({steps})")
    return int(bool(found))


Found = tuple[str, str, str]


def of_steps(rows: list[dict], config: dict, last: int) -> Iterator[Found]:
    if not rows:
        return
    now = rows[-last:]

    def mean(name: str) -> float | None:
        values = [row[name] for row in now if name in row]
        return fmean(values) if values else None

    if all(row.get("reward/std", 1.0) == 0.0 for row in now):
        value = now[-1].get("reward/mean", 0.0)
        yield (
            "no-variance",
            f"every reward of the last {len(now)} steps is {value:g}: advantages are 0, nothing is learned",
            "look at one transcript; make the task easier or give partial credit; check sampling.temperature > 0",
        )
    if mean("actor/skipped_zero_advantage"):
        yield (
            "steps-without-gradient",
            "actor/skipped_zero_advantage is 1",
            "see no-variance; policy nonzero_variance_task_count",
        )
    if mean("actor/skipped_non_finite"):
        yield "gradient-not-finite", "optimizer steps were left out", "lower optim.lr; trainer.dtype fp32"
    if (kl := mean("actor/ppo_kl")) is not None and abs(kl) > 0.2:
        yield "policy-jumps", f"actor/ppo_kl is {kl:.3g} a step", "lower optim.lr, or algorithm.epochs and mini_batches"
    if (gap := mean("training/rollout_logprobs_diff_mean")) is not None and gap > 0.05:
        yield (
            "engine-and-trainer-disagree",
            f"logprobs differ by {gap:.3g} on average",
            "algorithm.rollout_correction token_is; the same dtype on both sides",
        )
    if (entropy := mean("actor/entropy")) is not None and entropy < 0.05:
        yield "entropy-gone", f"actor/entropy is {entropy:.3g}", "clip_ratio_high 0.28; entropy_coef; fewer epochs"
    tokens, trained = mean("batch/sampled_tokens"), mean("episodes/trained")
    limit = config.get("sampling", {}).get("max_tokens")
    calls = mean("merge/calls")
    if tokens and calls and limit and tokens / calls > 0.9 * limit:
        yield "answers-cut", f"answers have {tokens / calls:.0f} of {limit} tokens", "raise sampling.max_tokens"
    aborted, expired = mean("episodes/aborted") or 0.0, mean("episodes/expired") or 0.0
    if trained and aborted + expired > trained / 4:
        yield (
            "episodes-die",
            f"{aborted:.0f} aborted and {expired:.0f} expired a step, for {trained:.0f} trained",
            "the abort reasons in the events; batching.episode_lease_s for the expired",
        )
    inexact = mean("merge/inexact_tokens")
    if inexact and tokens and inexact > tokens / 10:
        yield (
            "context-rewritten",
            f"{inexact:.0f} of {tokens:.0f} tokens have another context than when they were sampled",
            "match: token; history: as_sampled",
        )
    if len(rows) >= 2 * last:
        best = max(fmean(r.get("reward/mean", 0.0) for r in rows[i : i + last]) for i in range(len(rows) - last))
        end = mean("reward/mean") or 0.0
        if best > 0 and end < best / 2:
            yield (
                "collapse",
                f"reward/mean fell from {best:.3f} to {end:.3f}",
                "go back to a checkpoint; lower optim.lr; add algorithm.kl_coef",
            )
    rollout, update = mean("timing/rollout_s"), mean("timing/update_s")
    if rollout and update and update > 4 * rollout:
        yield "update-bound", f"update {update:.0f} s, rollout {rollout:.0f} s", "shorter answers; lora; more cores"


def of_events(events: list[dict]) -> Iterator[Found]:
    reasons: Counter[str] = Counter()
    example: dict[str, str] = {}

    def count(reason: str) -> None:
        """Reasons that differ in their numbers only are one."""
        alike = re.sub(r"\d+", "0", reason)
        reasons[alike] += 1
        example.setdefault(alike, reason[:240])

    for data in (e["data"] for e in events if e["kind"] == "episode"):
        for how in ("aborted", "expired"):
            if how in data:
                count(f"{how}: {data[how]}")
        if data.get("outcome") == "rejected":
            count(f"rejected: {data.get('code')}")
    for reason, times in reasons.most_common(3):
        if times >= 3:
            yield "episodes-lost", f"{times} times {example[reason]}", "mend the agent: references/symptoms.md"
    lost = [e["data"]["lost"] for e in events if e["kind"] == "engine" and "lost" in e["data"]]
    if lost:
        yield "engine-lost", f"{len(lost)} times, last: {str(lost[-1])[:120]}", "engine.log in the run's folder"
    states = [e["data"] for e in events if e["kind"] == "state"]
    if states and states[-1].get("state") == "failed":
        yield "server-failed", str(states[-1].get("reason"))[:200], "mend what it says, then start again"


def from_folder(folder: Path) -> tuple[list[dict], list[dict], dict]:
    metrics, happened, resolved = (folder / name for name in ("metrics.jsonl", "events.jsonl", "resolved_config.json"))
    events = lines(happened) if happened.exists() else []
    rows = [] if events and not metrics.exists() else lines(metrics)  # a training may die before its first step
    return rows, events, json.loads(resolved.read_text()) if resolved.exists() else {}


def from_server(url: str) -> tuple[list[dict], list[dict], dict]:
    steps = [record["metrics"] | {"step": record["step"]} for record in get(f"{url}/v1/steps")]
    return steps, get(f"{url}/v1/events"), get(f"{url}/v1/config")


def lines(path: Path) -> list[dict]:
    """Whole lines only: the last one may be being written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()]


def get(url: str):
    key = os.environ.get("SWARMTUNE_KEY")
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if "127.0.0.1" in url else []))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
