"""The `swarmtune` command: serve a model, and look after a server. The only module of swarmtune that reads the
environment and sets up logging."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from swarmtune.client import SwarmClient
    from swarmtune.gateway.auth import Capability

PATIENCE_S = 3.0
"""How long a command waits for a server that does not answer."""
STOP_S = 120.0
"""How long a server may take to save a checkpoint and end."""
DEFAULT_URL = "http://127.0.0.1:10086"

app = typer.Typer(
    help="Serve a model to swarm clients and train it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option("--url", envvar="SWARMTUNE_URL", help="The server.")]
Key = Annotated[str | None, typer.Option("--key", envvar="SWARMTUNE_KEY", help="A key of the server, if it has keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    app()


def fail(message: str, code: int = 1) -> NoReturn:
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a control key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 10086,
    data_dir: Annotated[Path, typer.Option(help="Where runs, journals and checkpoints go.")] = Path("runs/server"),
    control_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds a key for everything.")
    ] = None,
    key_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=CAP,…", help="Variable with a further key: observe, rollout, evaluate, control."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on with the last training in the folder.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Start a server without a model; a client wakes it with a configuration.

    A server that was killed goes on with its training when it is started again on the same data folder.
    """
    from swarmtune.gateway.auth import BindRefused
    from swarmtune.serve import ServeError, ServeSettings, run

    set_up_logging(verbose)
    settings = ServeSettings(data_dir, host, port, read_keys(control_key_env, key_env or []), fresh)
    try:
        run(settings, lambda url: typer.echo(f"swarm server at {url} · data in {data_dir}"))
    except (BindRefused, ServeError) as error:
        fail(str(error), 2)


@app.command()
def status(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """What the server does."""
    from swarmtune.errors import SwarmError

    try:
        with connect(url, key) as swarm:
            found = swarm.status()
    except SwarmError as error:
        fail(str(error))
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    typer.echo(f"{found.state.value} · step {found.step} · model {found.model or 'none'}")
    typer.echo(
        f"episodes: {found.open_episodes} open, {found.pooled_episodes} pooled · clients: {found.clients} · "
        f"up {found.uptime_s:.0f} s · run {found.run_dir or 'none'}"
    )
    if found.reason:
        typer.echo(f"reason: {found.reason}")
    if found.log_tail:
        typer.echo(found.log_tail)


@app.command()
def stop(
    url: Url = DEFAULT_URL,
    key: Key = None,
    training_only: Annotated[bool, typer.Option("--training-only", help="Stop training, keep the server.")] = False,
) -> None:
    """Save a checkpoint and end the server. Started again on its data folder, it goes on with its training."""
    from swarmtune.errors import SwarmError

    try:
        with connect(url, key) as swarm:
            if training_only:
                typer.echo(f"training stopped, server {swarm.stop().state.value}")
            else:
                swarm.shutdown()
                wait_until_gone(url, key)
                typer.echo("server stopped")
    except SwarmError as error:
        fail(str(error))


@app.command()
def pool(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """What the next step waits for."""
    from swarmtune.errors import SwarmError

    try:
        with connect(url, key) as swarm:
            found = swarm.pool()
    except SwarmError as error:
        fail(str(error))
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    typer.echo(f"step {found.step} · {found.policy} · {found.explanation}")
    for condition in found.conditions:
        mark = "met  " if condition.met else "unmet"
        typer.echo(f"  {mark} {condition.name}: {condition.have:g} of {condition.need:g} {condition.detail}")


@app.command()
def events(
    url: Url = DEFAULT_URL,
    key: Key = None,
    after: Annotated[int, typer.Option(min=0, help="Only events with a greater number.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Follow what happens; Ctrl-C ends it."""
    from swarmtune.errors import SwarmError

    try:
        with connect(url, key) as swarm:
            for event in swarm.events(after):
                if as_json:
                    typer.echo(event.model_dump_json())
                else:
                    said = " ".join(f"{name}={value}" for name, value in event.data.items() if name != "metrics")
                    typer.echo(f"{event.seq:>6} {event.kind:<10} {said}")
    except KeyboardInterrupt:
        return
    except SwarmError as error:
        fail(str(error))


def connect(url: str, key: str | None, patience_s: float = PATIENCE_S) -> SwarmClient:
    from swarmtune.client import SwarmClient

    return SwarmClient(url, api_key=key, patience_s=patience_s)


def wait_until_gone(url: str, key: str | None) -> None:
    """Wait until nobody answers at `url`, for as long as a stop may take."""
    from swarmtune.errors import ServerUnreachable

    with connect(url, key, patience_s=0.0) as swarm:
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            try:
                swarm.status()
            except ServerUnreachable:
                return
            time.sleep(0.1)
    fail(f"the server at {url} still answers after {STOP_S:.0f} s; its log says what it waits for")


def read_keys(control_key_env: str | None, key_envs: list[str]) -> dict[str, frozenset[Capability]]:
    """Keys from the environment variables named on the command line."""
    from swarmtune.gateway.auth import Capability

    keys: dict[str, frozenset[Capability]] = {}
    if control_key_env is not None:
        keys[_environment(control_key_env, "--control-key-env")] = frozenset(Capability)
    for spec in key_envs:
        name, _, names = spec.partition("=")
        try:
            capabilities = frozenset(Capability(part.strip()) for part in names.split(",") if part.strip())
        except ValueError:
            capabilities = frozenset()
        if not capabilities:
            fail(f"--key-env {spec}: give NAME=CAPABILITY,… with {', '.join(Capability)}", 2)
        keys[_environment(name, "--key-env")] = capabilities
    return keys


def _environment(name: str, option: str) -> str:
    value = os.environ.get(name, "")
    if len(value) < 16:
        fail(f"{option} {name}: the environment variable must hold a key of 16 characters or more", 2)
    return value


class _Fields(logging.Formatter):
    """Constant sentences with their fields behind."""

    _USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        fields = {k: v for k, v in vars(record).items() if k not in self._USUAL}
        line = super().format(record)
        return f"{line} {json.dumps(fields, default=str)}" if fields else line


def set_up_logging(verbose: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Fields("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.INFO)


if __name__ == "__main__":
    main()
