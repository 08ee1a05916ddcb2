"""A training script for several models: one command line, a server for each role, a set of output files for each.

    GAME = SwarmScript(script=Script(name="game", tasks=…, rollout=…), roles=lambda parameters: ("white", "black"))
    if __name__ == "__main__":
        run(GAME)

    python train.py [--server white=URL …] [--set optim.lr=1e-5] [--set white.optim.lr=1e-6] [options of a Script]

`script.rollout` is a Swarm's: role → reward. Keys under a role's name are that role's alone, all others are
everybody's. A role without --server gets a server of this script's own. Files, as of a Script, in OUT/ROLE/;
OUT/rewards.png has all curves. Exit status as of a Script.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from swarmtune import script as one
from swarmtune.client import PATIENCE_S, SwarmClient
from swarmtune.config import ConfigError
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
from swarmtune.swarm import Swarm


@dataclass(frozen=True)
class SwarmScript:
    script: one.Script
    roles: Callable[[Any], Sequence[str]]
    """(parameters) → the roles that have a model of their own."""

    def resolve(self, asked: Mapping[str, Any]) -> dict[str, one.ScriptConfig]:
        """Role → configuration: what was asked for everybody, overlaid with what was asked for the role.

        Raises:
            ConfigError: one line per problem.
        """
        known = self.script.config_model.model_fields
        common = {key: value for key, value in asked.items() if key in known}
        roles = self.roles(self.script.resolve(common).parameters)
        if not roles or len(set(roles)) != len(roles):
            raise ConfigError(f"roles: at least one, each once; got {', '.join(roles) or 'none'}")
        if set(asked) - set(known) - set(roles):
            self.script.resolve({key: value for key, value in asked.items() if key not in roles})  # raises, naming it
        return {role: self.script.resolve(one.overlay(common, asked.get(role, {}))) for role in roles}


def run(script: SwarmScript, argv: Sequence[str] | None = None) -> NoReturn:
    """Carry out the command line and exit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(script, argv))


def main(script: SwarmScript, argv: Sequence[str] | None = None) -> int:
    """Carry out the command line; returns the exit status."""
    options = _parser(script.script.name).parse_args(argv)
    try:
        configs = script.resolve(one.asked_for(options))
        _train(script, configs, _urls(options.server, configs), options.out or one.dated_folder(script.script.name))
        return one.OK
    except (ConfigError, BadConfig, ConfigConflict, AccessDenied) as error:
        return one.complain(error, one.BAD_INPUT)
    except (StartFailed, ServerUnreachable, NotStarted) as error:
        return one.complain(error, one.SERVER_FAILED)
    except (SwarmError, OSError) as error:
        return one.complain(error, one.OTHER)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Trains {name}: a model for each role.")
    parser.add_argument("--config", type=Path, help="YAML or JSON file; keys under a role's name are that role's")
    parser.add_argument("--set", action="append", default=[], metavar="[ROLE.]KEY=VALUE", help="wins over --config")
    parser.add_argument("--seed", type=int, help="same as --set seed=N")
    parser.add_argument("--steps", type=int, help="same as --set steps=N")
    parser.add_argument("--out", type=Path, help=f"folder for the results; default runs/<date>-{name}")
    parser.add_argument("--server", action="append", default=[], metavar="ROLE=URL", help="a running server of a role")
    return parser


def _urls(given: Sequence[str], roles: Mapping[str, Any]) -> dict[str, str]:
    """Role → address, of the roles that were given one.

    Raises:
        ConfigError
    """
    urls = {role: url for role, _, url in (text.partition("=") for text in given)}
    if wrong := [role for role, url in urls.items() if role not in roles or not url]:
        raise ConfigError(f"--server {wrong[0]}: write ROLE=URL; the roles are {', '.join(roles)}")
    return {role: one.server_address(url) for role, url in urls.items()}


def _train(script: SwarmScript, configs: Mapping[str, one.ScriptConfig], urls: Mapping[str, str], out: Path) -> None:
    """Raises:
    SwarmError
    """
    common = next(iter(configs.values()))
    tasks = script.script.tasks(common.parameters, common.seed)
    if not tasks:
        raise ConfigError("the script has no tasks with these parameters")
    results = {role: one.Results(out / role, resume=False) for role in configs}
    with ExitStack() as stack:
        clients = {}
        for role, config in configs.items():
            results[role].write_config(config)
            results[role].write_data_digest(tasks)
            url, patience_s = urls.get(role), PATIENCE_S
            if url is None:
                url = stack.enter_context(LocalServer(out / role / "server", fresh=True)).url
                patience_s = one.OWN_PATIENCE_S
            one.say(f"{role}: server {url}, results in {out / role}")
            clients[role] = SwarmClient(url, name=config.client_name, share=config.client_share, patience_s=patience_s)
        swarm = stack.enter_context(Swarm(clients))
        swarm.start({role: config.for_server() for role, config in configs.items()})
        for role in configs:
            stack.callback(results[role].close, clients[role])

            if script.script.prepare is not None:
                script.script.prepare(clients[role], configs[role])

        def note(role: str, record: StepRecord) -> None:
            results[role].step(clients[role], record)
            reward = record.metrics.get("reward/mean", float("nan"))
            one.say(f"{role} step {record.step:>3}/{configs[role].steps}  reward/mean {reward:.3f}")

        swarm.train(
            tasks,
            script.script.rollout,
            steps={role: config.steps for role, config in configs.items()},
            parallel=common.parallel,
            attempts=common.attempts,
            seed=common.seed,
            on_step=note,
        )
        numbers = _evaluate(script.script, common, swarm)
        for role in configs:
            results[role].write_evaluation(numbers.get(role, {}))
    one.plot_rewards({role: results[role].rewards for role in configs}, out / "rewards.png")
    for role in configs:
        one.say(f"{role}: {results[role].summary()}")


def _evaluate(script: one.Script, config: one.ScriptConfig, swarm: Swarm) -> dict[str, dict[str, Any]]:
    """Role → its numbers; empty without evaluation."""
    if not config.eval.repeats:
        return {}
    done = swarm.evaluate(
        (script.eval_tasks or script.tasks)(config.parameters, config.seed),
        script.rollout,
        k=config.eval.repeats,
        sampling={"temperature": config.eval.temperature},
        parallel=config.eval.parallel,
        seed=config.seed,
    )
    return {role: one.numbers_of(evaluation, config.eval.repeats) for role, evaluation in done.items()}
