"""A trainer stand-in: rewards drawn from a response surface with noise, and every way in which a training can go wrong.

`python -m a3r.simulate` follows the training client contract (--config, --seed, --out, --resume, --print-schema), so a
study runs it as it runs a real client; `draw` gives the same curve in memory for studies by the hundred. A curve
depends on configuration and seed only. Standard library only at import: a process starts in some 30 ms.

The surface: the factor named by `sim.factor` crosses `sim.threshold` between `sim.low` and `sim.high` (a step, or a
logistic of `sim.width` decades), or peaks at `sim.peak`; `sim.moderator` at or above `sim.moderator_at` multiplies the
threshold by `sim.shift`; `variant: B` adds `sim.effect`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from a3r.blueprint import Blueprint
    from a3r.goal import GoalLock
    from a3r.leader import Decision, History, Leader
    from a3r.results import Observation

FAILURES = ("none", "crash", "code", "config", "stall", "diverge", "oom", "lie", "external", "slow_start")

KEYS: dict[str, tuple[type, Any]] = {
    "model": (str, "simulated"),
    "batch_size": (int, 16),
    "max_response_length_in_one_turn": (int, 4000),
    "optim.lr": (float, 1e-6),
    "variant": (str, "A"),
    "x": (float, 1.0),
    "total_training_steps": (int, 6),
    "ppo_epoch": (int, 1),
    "mini_batch_num": (int, 1),
    "step_s": (float, 0.0),
    "sim.factor": (str, "x"),
    "sim.threshold": (float, 1.0),
    "sim.width": (float, 0.0),
    "sim.falling": (bool, False),
    "sim.peak": (float, 0.0),
    "sim.low": (float, 0.0),
    "sim.high": (float, 1.0),
    "sim.moderator": (str, ""),
    "sim.moderator_at": (float, 0.0),
    "sim.shift": (float, 1.0),
    "sim.effect": (float, 0.0),
    "sim.noise": (float, 0.0),
    "sim.common": (float, 0.0),
    "sim.step_noise": (float, 0.0),
    "sim.fail": (str, "none"),
    "sim.fail_p": (float, 1.0),
    "sim.fail_step": (int, 2),
    "sim.fail_first": (int, 1),
    "sim.fail_level": (str, ""),
}
"""Dotted key → (type, default). `sim.fail_first`: how many attempts of a run fail; `sim.fail_level`: only at this level
of `sim.factor` (as text); `sim.common`: share of the noise variance that a seed has in common over all arms."""

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


class SimulationConfigError(ValueError):
    """A configuration the simulated client does not take."""


def schema() -> dict[str, Any]:
    properties: dict[str, Any] = {k: {"type": _JSON_TYPES[t], "default": d} for k, (t, d) in KEYS.items()}
    properties["sim.fail"]["enum"] = list(FAILURES)
    for key in ("batch_size", "max_response_length_in_one_turn", "total_training_steps", "ppo_epoch", "mini_batch_num"):
        properties[key]["minimum"] = 1
    properties["optim.lr"]["exclusiveMinimum"] = 0
    return {"title": "simulated client", "type": "object", "properties": properties, "additionalProperties": False}


def resolve(config: Mapping[str, Any]) -> dict[str, Any]:
    """The full configuration.

    Raises:
        SimulationConfigError: unknown key or wrong type.
    """
    out = {key: default for key, (_, default) in KEYS.items()}
    for key, value in config.items():
        if key not in KEYS:
            raise SimulationConfigError(f"{key}: unknown key; see --print-schema")
        kind = KEYS[key][0]
        good = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not good or (isinstance(value, bool) and kind is not bool):
            raise SimulationConfigError(f"{key}: {value!r} is not of type {kind.__name__}")
        out[key] = value
    return out


def plateau(config: Mapping[str, Any]) -> float:
    """The noise-free value that a resolved configuration's training ends at."""
    low, high = config["sim.low"], config["sim.high"]
    value = _height(config) * (high - low) + low
    return value + (config["sim.effect"] if config["variant"] == "B" else 0.0)


def _height(config: Mapping[str, Any]) -> float:
    """Where between low (0) and high (1) the factor puts the plateau."""
    factor = config[config["sim.factor"]]
    if not isinstance(factor, int | float) or config["sim.factor"] == "variant":
        return 1.0
    if config["sim.peak"] > 0:
        return math.exp(-((math.log10(factor / config["sim.peak"])) ** 2))
    threshold = config["sim.threshold"]
    if config["sim.moderator"] and float(config[config["sim.moderator"]]) >= config["sim.moderator_at"]:
        threshold *= config["sim.shift"]
    if config["sim.width"] > 0:
        height = 1.0 / (1.0 + math.exp(-4.0 * math.log10(factor / threshold) / config["sim.width"]))
    else:
        height = 1.0 if factor >= threshold * (1 - 1e-9) else 0.0
    return 1.0 - height if config["sim.falling"] else height


def curve(config: Mapping[str, Any], seed: int) -> list[float]:
    """Mean reward of steps 1…n of a resolved configuration."""
    steps = config["total_training_steps"]
    end = plateau(config)
    start = min(config["sim.low"], end)
    own = random.Random(f"{_identity(config)}:{seed}")
    shared = random.Random(f"seed:{seed}").gauss(0.0, 1.0)
    common = config["sim.common"]
    offset = config["sim.noise"] * (math.sqrt(common) * shared + math.sqrt(1.0 - common) * own.gauss(0.0, 1.0))
    out = []
    for step in range(1, steps + 1):
        progress = 1.0 if steps == 1 else (1 - math.exp(-4.0 * step / steps)) / (1 - math.exp(-4.0))
        out.append(start + (end + offset - start) * progress + config["sim.step_noise"] * own.gauss(0.0, 1.0))
    return out


def fails(config: Mapping[str, Any], seed: int, attempt: int = 1) -> str:
    """The failure this attempt meets, `none` among them."""
    if config["sim.fail"] == "none" or attempt > config["sim.fail_first"]:
        return "none"
    if config["sim.fail_level"] and str(config[config["sim.factor"]]) != config["sim.fail_level"]:
        return "none"
    lot = random.Random(f"fail:{_identity(config)}:{seed}:{attempt}").random()
    return config["sim.fail"] if lot < config["sim.fail_p"] else "none"


def _identity(config: Mapping[str, Any]) -> str:
    """What decides a curve: timing and failure settings do not."""
    kept = {k: v for k, v in config.items() if not k.startswith("sim.fail") and k != "step_s"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def draw(blueprint: Blueprint, seed: int, stage: int = 0, attempts: int = 3) -> Observation:
    """The observation that running the simulated client would leave, after up to `attempts` attempts."""
    from a3r.results import FailureClass, Observation, RunStatus

    config = resolve(blueprint.config)
    run = f"{blueprint.name}/s{seed}"
    met = [fails(config, seed, attempt) for attempt in range(1, attempts + 1)]
    wall = max(config["step_s"] * config["total_training_steps"], 0.001)
    if "none" not in met and met[0] != "diverge":
        classes = {"oom": FailureClass.OOM, "stall": FailureClass.STALLED, "lie": FailureClass.FABRICATED}
        failure = classes.get(met[0], FailureClass.CODE)
        return Observation(
            run, blueprint.name, blueprint.id or "", seed, RunStatus.FAILED, failure, met[0], wall_s=wall, stage=stage
        )
    if met[0] == "diverge":
        return Observation(
            run, blueprint.name, blueprint.id or "", seed, RunStatus.DIVERGED, FailureClass.DIVERGED, "nan",
            wall_s=wall, stage=stage,
        )  # fmt: skip
    values = curve(config, seed)
    series = {"reward/mean": tuple((i + 1, value) for i, value in enumerate(values))}
    return Observation(
        run=run, arm=blueprint.name, blueprint=blueprint.id or "", seed=seed, status=RunStatus.COMPLETED,
        series=series, wall_s=wall, stage=stage,
    )  # fmt: skip


def study(
    lock: GoalLock, leader: Leader, slots: int = 8, attempts: int = 3, runs: int | None = None
) -> tuple[Decision, History]:
    """A whole study in memory: every run is drawn instead of started.

    Args:
        attempts: how often a failing run is tried.
        runs: budget of runs; the goal's when None.
    """
    from a3r.leader import BudgetLeft, Decision, History

    most = runs if runs is not None else lock.goal.budget.runs
    history = History(slots=slots, budget=BudgetLeft(runs=most))
    while True:
        step = leader.plan(lock, history)
        if isinstance(step, Decision):
            return step, history
        done = {(o.arm, o.seed) for o in history.observations}
        new = [
            draw(arm.blueprint, seed, step.stage, attempts)
            for arm in step.arms
            for seed in arm.seeds
            if (arm.name, seed) not in done
        ]
        left = BudgetLeft(runs=None if history.budget.runs is None else history.budget.runs - len(new))
        history = History((*history.plans, step), (*history.observations, *new), left, slots)


# --- the client process --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="a3r.simulate", description="A simulated training client.")
    parser.add_argument("--config", type=Path, help="JSON file: dotted key → value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--server", default="")
    parser.add_argument("--state", type=Path, help="where steps survive an attempt; default OUT/../../ckpt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--print-schema", action="store_true")
    args = parser.parse_args(argv)
    if args.print_schema:
        print(json.dumps(schema(), indent=1))
        return 0
    if args.config is None or args.out is None:
        parser.error("--config and --out are needed")
    try:
        config = resolve(json.loads(args.config.read_text()))
    except SimulationConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    return _train(config, args)


def _train(config: dict[str, Any], args: argparse.Namespace) -> int:
    state = args.state or args.out.parent.parent / "ckpt"
    state.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = _restored(state) if args.resume else []
    attempt = _count_attempt(state)
    failure = fails(config, args.seed, attempt)
    resolved = config | ({"batch_size": config["batch_size"] + 1} if failure == "config" else {})
    _write(args.out / "resolved_config.json", json.dumps(resolved, sort_keys=True))
    if failure == "slow_start":
        time.sleep(3600)
    values = curve(config, args.seed)
    with (args.out / "metrics.jsonl").open("w") as out:
        for row in rows:
            _append(out, row)
        for step in range(len(rows) + 1, len(values) + 1):
            if failure != "none" and step == min(config["sim.fail_step"], len(values)):
                code = _fail(failure, step, out)
                if code is not None:
                    return code
            time.sleep(config["step_s"])
            rows.append({"step": step, "reward/mean": values[step - 1], "kl": 0.01})
            _append(out, rows[-1])
            _write(state / "steps.json", json.dumps(rows))
    evaluation = {"reward/final": {"value": values[-1], "n_items": 1}}
    _write(args.out / "eval.json", json.dumps(evaluation))
    return 0


def _fail(failure: str, step: int, out: Any) -> int | None:
    """Do what a training with this trouble does; an exit code, or None to go on."""
    match failure:
        case "crash":
            os.kill(os.getpid(), 9)
        case "oom":
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", file=sys.stderr)
            return 1
        case "code":
            raise KeyError("reward_fn")
        case "external":
            print("httpx.HTTPStatusError: Client error '429 Too Many Requests' from the judge", file=sys.stderr)
            return 1
        case "stall":
            time.sleep(3600)
        case "diverge":
            out.write(json.dumps({"step": step, "reward/mean": math.nan}) + "\n")
            out.flush()
            time.sleep(3600)
        case "lie":
            _append(out, {"step": step + 1000, "reward/mean": 1.0})
            return 0
    return None


def _restored(state: Path) -> list[dict[str, Any]]:
    try:
        return json.loads((state / "steps.json").read_text())
    except (OSError, ValueError):
        return []


def _count_attempt(state: Path) -> int:
    path = state / "attempts"
    count = 1 + (int(path.read_text()) if path.exists() else 0)
    _write(path, str(count))
    return count


def _append(out: Any, row: Mapping[str, Any]) -> None:
    out.write(json.dumps(row) + "\n")
    out.flush()


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
