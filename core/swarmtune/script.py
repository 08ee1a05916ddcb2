"""What makes a training script: one command line, one set of output files, by hand and under `a3r research` alike.

    class Task(Parameters):
        digits: int = 1

    SCRIPT = Script(
        name="arithmetic",
        parameters=Task,
        defaults={"model": "smollm2-135m", "steps": 12, "optim.lr": 2e-5},
        tasks=make_tasks,        # (parameters, seed) → tasks
        rollout=rollout,         # (task, episode) → reward
    )
    if __name__ == "__main__":
        run(SCRIPT)

    python train.py [--config FILE] [--set key=value …] [--seed N] [--steps N] [--out DIR] [--server URL] [--resume]
    python train.py --print-schema

Configuration keys are TrainConfig's, those of ScriptConfig, and the script's own under `task.`. Without --server the
script starts a server of its own and stops it at the end. Files in --out: resolved_config.json, metrics.jsonl (a line
a step), events.jsonl, env.json, eval.json, reward.png. Exit status: 0 done, 2 configuration or input is wrong, 3 the
server failed, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from swarmtune.client import PATIENCE_S, SwarmClient
from swarmtune.config import ConfigError, TrainConfig, explain, nest
from swarmtune.errors import (
    AccessDenied,
    BadConfig,
    ConfigConflict,
    NotStarted,
    ServerUnreachable,
    StartFailed,
    SwarmError,
)
from swarmtune.local import LocalServer
from swarmtune.protocol import StepRecord
from swarmtune.transport import checked_url

if TYPE_CHECKING:
    from swarmtune.evaluation import Evaluation

OK, OTHER, BAD_INPUT, SERVER_FAILED = 0, 1, 2, 3
LAST_STEPS = 2
"""How many of the last steps `reward/final` is the mean of."""
OWN_PATIENCE_S = 30.0
"""A server of one's own that is gone for so long stays gone."""


class Parameters(BaseModel):
    """Base of a script's own parameters: subclass it with fields that have defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluationConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    repeats: int = Field(default=0, ge=0)
    """Evaluation episodes per task after the last step; 0 for none."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    parallel: int = Field(default=32, ge=1)


class ScriptConfig(TrainConfig):
    """TrainConfig and what the client itself needs to know."""

    steps: int = Field(12, ge=1)
    """Train until the server has done this many steps."""
    parallel: int = Field(32, ge=1)
    """Episodes run at once."""
    attempts: int = Field(4, ge=1)
    """How often one episode is tried before its task is dropped for another one."""
    client_name: str | None = None
    """Registers the client under this name."""
    client_share: int | None = Field(None, ge=1)
    """Tasks of each batch that are this client's; needs client_name."""
    eval: EvaluationConfig = EvaluationConfig()

    def for_server(self) -> TrainConfig:
        """The part that the server gets."""
        return TrainConfig.model_validate({name: getattr(self, name) for name in TrainConfig.model_fields})

    @property
    def parameters(self) -> Any:
        return getattr(self, "task", None)


@dataclass(frozen=True)
class Script:
    """One training script."""

    name: str
    tasks: Callable[[Any, int], Sequence[Any]]
    """(parameters, seed) → training tasks."""
    rollout: Callable[..., Any]
    """(task, episode) → reward; see SwarmClient.train."""
    parameters: type[Parameters] = Parameters
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key → default of this script."""
    eval_tasks: Callable[[Any, int], Sequence[Any]] | None = None
    """Tasks of the evaluation; None takes the training tasks."""
    prepare: Callable[[SwarmClient, Any], None] | None = None
    """(client, configuration) called once the model is up, before the training: a supervised warm-up, say."""

    @property
    def config_model(self) -> type[ScriptConfig]:
        return create_model(
            f"{self.name.title().replace('-', '').replace('_', '')}Config",
            __base__=ScriptConfig,
            task=(self.parameters, self.parameters()),
        )

    def resolve(self, asked: Mapping[str, Any]) -> ScriptConfig:
        """Defaults of the script, overlaid with what was asked for, nested or dotted.

        Raises:
            ConfigError: one line per problem, with the nearest known key.
        """
        model = self.config_model
        try:
            return model.model_validate(overlay(nest(self.defaults), nest(asked)))
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error, model))) from None

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the configuration; a key with a default of the script is not required."""
        schema = self.config_model.model_json_schema()
        given = {key.split(".")[0] for key in self.defaults}
        schema["required"] = [key for key in schema.get("required", []) if key not in given]
        return schema


def run(script: Script, argv: Sequence[str] | None = None) -> NoReturn:
    """Carry out the command line and exit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(script, argv))


def main(script: Script, argv: Sequence[str] | None = None) -> int:
    """Carry out the command line; returns the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("swarmtune").setLevel(logging.INFO)
    options = _parser(script).parse_args(argv)
    if options.print_schema:
        print(json.dumps(script.schema(), indent=1))
        return OK
    try:
        config = script.resolve(asked_for(options))
        if not script.tasks(config.parameters, config.seed):
            raise ConfigError("the script has no tasks with these parameters")
        if options.server:
            options.server = server_address(options.server)
        return _train(script, config, options)
    except (ConfigError, BadConfig, ConfigConflict, AccessDenied) as error:
        return complain(error, BAD_INPUT)
    except (StartFailed, ServerUnreachable, NotStarted) as error:
        return complain(error, SERVER_FAILED)
    except (SwarmError, OSError) as error:
        return complain(error, OTHER)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def complain(error: Exception, status: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return status


def _parser(script: Script) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Trains {script.name}.")
    parser.add_argument("--config", type=Path, help="YAML or JSON file; nested or dotted keys")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one key; wins over --config")
    parser.add_argument("--seed", type=int, help="same as --set seed=N")
    parser.add_argument("--steps", type=int, help="same as --set steps=N")
    parser.add_argument("--out", type=Path, help=f"folder for the results; default runs/<date>-{script.name}")
    parser.add_argument("--server", metavar="URL", help="a running swarm server; default: one of this script's own")
    parser.add_argument("--state", type=Path, help="data folder of the script's own server; default OUT/server")
    parser.add_argument("--resume", action="store_true", help="go on with the training in --state, if there is one")
    parser.add_argument("--print-schema", action="store_true", help="print the JSON Schema of the configuration")
    return parser


def asked_for(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line asks for, nested.

    Raises:
        ConfigError: the file cannot be read, or a --set is no key=value.
    """
    asked = nest(_read_file(options.config)) if options.config else {}
    for setting in options.set:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: write key=value")
        asked = overlay(asked, nest({key: _read_value(value)}))
    flags = {name: getattr(options, name) for name in ("seed", "steps") if getattr(options, name) is not None}
    return overlay(asked, flags)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is neither YAML nor JSON: {error}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: must hold a mapping of keys to values")
    return data


def server_address(text: str) -> str:
    """Raises:
    ConfigError: nobody could ever answer there.
    """
    try:
        return checked_url(text)
    except ValueError as error:
        raise ConfigError(f"--server {error}") from None


def _read_value(text: str) -> Any:
    """A value as JSON where it is JSON, so that 1e-5 is a number; plain text otherwise."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = overlay(below, value)
        out[key] = value
    return out


def _train(script: Script, config: ScriptConfig, options: argparse.Namespace) -> int:
    out = options.out or dated_folder(script.name)
    results = Results(out, resume=options.resume)
    results.write_config(config)
    results.write_data_digest(script.tasks(config.parameters, config.seed))
    with contextlib.ExitStack() as stack:
        if options.server:
            url, patience_s = options.server, PATIENCE_S
        else:
            own = LocalServer(options.state or out / "server", fresh=not options.resume)
            url, patience_s = stack.enter_context(own).url, OWN_PATIENCE_S
        swarm = stack.enter_context(
            SwarmClient(url, name=config.client_name, share=config.client_share, patience_s=patience_s)
        )
        say(f"server {url}, results in {out}")
        swarm.start(config.for_server())
        stack.callback(results.close, swarm)
        if script.prepare is not None:
            script.prepare(swarm, config)
        results.add_steps(swarm.steps())
        swarm.train(
            script.tasks(config.parameters, config.seed),
            script.rollout,
            steps=config.steps,
            parallel=config.parallel,
            attempts=config.attempts,
            on_step=lambda record: results.step(swarm, record),
        )
        results.write_evaluation(_evaluate(script, config, swarm))
    say(f"done: {results.summary()}")
    for file in ("metrics.jsonl", "reward.png"):
        say(f"  {out / file}")
    return OK


def _evaluate(script: Script, config: ScriptConfig, swarm: SwarmClient) -> dict[str, dict[str, Any]]:
    """Name → {value, n_items, n_samples}; empty without evaluation."""
    if not config.eval.repeats:
        return {}
    tasks = (script.eval_tasks or script.tasks)(config.parameters, config.seed)
    done = swarm.evaluate(
        tasks,
        script.rollout,
        k=config.eval.repeats,
        sampling={"temperature": config.eval.temperature},
        parallel=config.eval.parallel,
        seed=config.seed,
    )
    return numbers_of(done, config.eval.repeats)


def numbers_of(done: Evaluation, repeats: int) -> dict[str, dict[str, Any]]:
    """An evaluation for eval.json: name → {value, n_items, n_samples}."""
    n = {"n_items": len(done.rewards), "n_samples": repeats}
    named = {"eval/reward": done.mean} | {f"eval/pass@{k}": estimate for k, estimate in done.pass_at.items()}
    return {name: {"value": estimate.value, **n} for name, estimate in named.items()}


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def dated_folder(name: str) -> Path:
    """runs/<date>-<name>, with a number behind it where that exists already."""
    first = Path("runs") / f"{datetime.date.today():%Y-%m-%d}-{name}"
    for path in _numbered(first):
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def _numbered(first: Path) -> Iterator[Path]:
    yield first
    number = 2
    while True:
        yield first.with_name(f"{first.name}-{number}")
        number += 1


class Results:
    """The output files of one run. metrics.jsonl and events.jsonl only ever grow, a line at a time."""

    def __init__(self, out: Path, *, resume: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self.rewards: dict[int, float] = {}
        """Step → mean reward of its batch."""
        self._last_step = 0
        self._last_event = 0
        if resume:
            self._read_metrics()
        else:
            for name in ("metrics.jsonl", "events.jsonl", "eval.json", "reward.png"):
                (out / name).unlink(missing_ok=True)

    def write_config(self, config: ScriptConfig) -> None:
        self._write("resolved_config.json", config.model_dump(mode="json"))

    def write_data_digest(self, tasks: Sequence[Any]) -> None:
        """env.json: what a study records about a run and only its client knows."""
        text = json.dumps(list(tasks), sort_keys=True, default=repr)
        self._write("env.json", {"data_sha256": hashlib.sha256(text.encode()).hexdigest()})

    def add_steps(self, records: Sequence[StepRecord]) -> None:
        """Append the steps that are not there yet: those a resumed server had done."""
        for record in records:
            if record.step > self._last_step:
                self._append_step(record)

    def step(self, swarm: SwarmClient, record: StepRecord) -> None:
        if record.step > self._last_step:
            self._append_step(record)
        self._add_events(swarm)

    def write_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """The evaluation's numbers, and reward/final: the mean over the last steps."""
        last = [self.rewards[step] for step in sorted(self.rewards)[-LAST_STEPS:]]
        final = {"reward/final": {"value": fmean(last), "n_items": len(last)}} if last else {}
        self._write("eval.json", final | dict(evaluation))

    def close(self, swarm: SwarmClient) -> None:
        """The plot and the last events, however the training ended."""
        with contextlib.suppress(SwarmError):
            self._add_events(swarm)
        if self.rewards:
            plot_rewards({"": self.rewards}, self._out / "reward.png")

    def summary(self) -> str:
        if not self.rewards:
            return "no reward was reported"
        steps = sorted(self.rewards)
        last = fmean(self.rewards[step] for step in steps[-LAST_STEPS:])
        return (
            f"reward/mean {self.rewards[steps[0]]:.3f} at step {steps[0]}, {last:.3f} over the last {LAST_STEPS} steps"
        )

    def _append_step(self, record: StepRecord) -> None:
        self._last_step = record.step
        if (reward := record.metrics.get("reward/mean")) is not None:
            self.rewards[record.step] = reward
        row = {"step": record.step, "time": record.ended_at, "weight_version": record.weight_version}
        self._append("metrics.jsonl", row | record.metrics)

    def _add_events(self, swarm: SwarmClient) -> None:
        for event in swarm.events_so_far(after=self._last_event):
            self._last_event = event.seq
            self._append("events.jsonl", event.model_dump(mode="json"))

    def _read_metrics(self) -> None:
        for row in _whole_lines(self._out / "metrics.jsonl"):
            self._last_step = max(self._last_step, row["step"])
            if "reward/mean" in row:
                self.rewards[row["step"]] = row["reward/mean"]
        for row in _whole_lines(self._out / "events.jsonl"):
            self._last_event = max(self._last_event, row["seq"])

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self._out / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _write(self, name: str, data: Any) -> None:
        part = self._out / f".{name}.part"
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        part.replace(self._out / name)


def plot_rewards(curves: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """A curve for each name: step → mean reward."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, rewards in curves.items():
        axes.plot(sorted(rewards), [rewards[step] for step in sorted(rewards)], marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the batch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if any(curves):
        axes.legend()
    figure.savefig(path, dpi=120)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file that may be missing or end in a torn line, which is cut off."""
    if not path.is_file():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    path.write_bytes(whole + b"\n" if whole else b"")
    return [json.loads(line) for line in whole.splitlines()]
