"""The `swarmtune` command: serve a model, and look after a server. The only module of swarmtune that reads the
environment and sets up logging."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

import typer

if TYPE_CHECKING:
    from swarmtune.client import SwarmClient
    from swarmtune.gateway.auth import Capability
    from swarmtune.protocol import EvaluationRecord, ExportView

    Dtype = Literal["bf16", "fp16", "fp32"]

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
    from_step: Annotated[
        int | None, typer.Option(min=0, help="Begin a new run at this checkpoint; the earlier run stays as it is.")
    ] = None,
    from_run: Annotated[
        str | None, typer.Option(metavar="RUN", help="--from-step: the earlier run, by name or folder; else the last.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Start a server without a model; a client wakes it with a configuration.

    A server that was killed goes on with its training when it is started again on the same data folder.
    """
    from swarmtune.gateway.auth import BindRefused
    from swarmtune.serve import ServeError, ServeSettings, run

    set_up_logging(verbose)
    if from_run is not None and from_step is None:
        fail("--from-run: needs --from-step, the checkpoint to begin at", 2)
    keys = read_keys(control_key_env, key_env or [])
    settings = ServeSettings(data_dir, host, port, keys, fresh, from_step, from_run)
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
        typer.echo(f"  {mark} {condition.name}: {condition.have:g} of {condition.need:g} {condition.detail}".rstrip())


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


@app.command()
def evaluations(
    url: Url = DEFAULT_URL,
    key: Key = None,
    name: Annotated[str | None, typer.Option(help="Only those of this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """The table of evaluations: what the weights of which step reached."""
    from swarmtune.errors import SwarmError

    try:
        with connect(url, key) as swarm:
            found = swarm.evaluations(name)
    except SwarmError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps([record.model_dump() for record in found], indent=2))
    else:
        print_table([("step", "name", "mean", "95 %", "pass@k", "episodes", "left out"), *map(evaluation_row, found)])


def evaluation_row(record: EvaluationRecord) -> tuple[str, ...]:
    """One line of the table of evaluations; of pass@k the powers of two and the last."""
    step, name = str(record.weight_version), record.name
    left = {"failed": record.failed, "mixed": record.mixed, "skipped": record.skipped}
    left_out = ", ".join(f"{count} {why}" for why, count in left.items() if count)
    if record.mean is None:
        said = {"finished": "–", "open": "runs"}.get(record.state, record.state)
        return (step, name, said, "", "", str(record.episodes), left_out)
    low, high = record.mean.low, record.mean.high
    interval = f"{low:.3f} … {high:.3f}" if low is not None and high is not None else "–"
    most = max(record.pass_at, default=0)
    shown = [k for k in sorted(record.pass_at) if k.bit_count() == 1 or k == most]
    passed = " ".join(f"@{k} {record.pass_at[k].value:.3f}" for k in shown)
    return (step, name, f"{record.mean.value:.3f}", interval, passed, str(record.episodes), left_out)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their longest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip())


# -- checkpoints

checkpoints_app = typer.Typer(help="List, save, export and prune checkpoints.", no_args_is_help=True)
app.add_typer(checkpoints_app, name="checkpoints")

Where = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help="A run's folder, or one above it; without it the running server is asked."),
]


@checkpoints_app.command("list")
def list_checkpoints(where: Where = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """The checkpoints of a run, what they are judged by, and why they are kept."""
    from swarmtune.checkpoints import CheckpointError, StoredRun, runs_under, table
    from swarmtune.errors import SwarmError

    try:
        if where is not None:
            runs = [StoredRun.read(folder) for folder in runs_under(where)]
            found = [(run.checkpoints(), run.config.checkpoint.best_by) for run in runs]
        else:
            with connect(url, key) as swarm:
                found = [(swarm.checkpoints(), swarm.config().checkpoint.best_by)]
    except (CheckpointError, SwarmError) as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps([view.model_dump() for views, _ in found for view in views], indent=2))
        return
    for views, metric in found:
        print_table(table(views, metric))


@checkpoints_app.command("save")
def save_checkpoint(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Have the server write a checkpoint now."""
    from swarmtune.errors import SwarmError

    try:
        with connect(url, key) as swarm:
            view = swarm.save_checkpoint()
    except SwarmError as error:
        fail(str(error))
    typer.echo(f"step {view.step}: {view.path} ({view.bytes / 1e6:.1f} MB)")


@checkpoints_app.command("export")
def export_checkpoint(
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    where: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN|CHECKPOINT]", help="A run's or checkpoint's folder; without it the running server is asked."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of a checkpoint; else the last one, of a server the current weights.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter as a peft folder.")] = False,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; else what the engine computed in.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The start model, where the checkpoint is not in its run's folder any more.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Write weights as a Hugging Face folder: merged, or the adapter alone. Complete or not at all."""
    from swarmtune.checkpoints import CheckpointError
    from swarmtune.errors import SwarmError

    kind = _dtype(dtype)
    try:
        if where is None:
            with connect(url, key) as swarm:
                done = swarm.export(out, step=step, adapter=adapter, dtype=kind)
        else:
            done = _export_offline(where, out.absolute(), step, adapter, kind, model)
    except (CheckpointError, SwarmError, ValueError, OSError) as error:
        fail(str(error))
    typer.echo(f"step {done.step}: {done.path} ({done.bytes / 1e6:.1f} MB)")


@checkpoints_app.command("prune")
def prune_checkpoints(
    where: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs' folders, or folders above them.")],
    keep_last: Annotated[int, typer.Option(min=0, help="The newest so many stay.")] = 1,
    keep_best: Annotated[int, typer.Option(min=0, help="So many of the best stay.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove every checkpoint: the runs cannot be gone on with.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
) -> None:
    """Remove checkpoints of runs whose server is not running, and say how much that frees."""
    from swarmtune.checkpoints import CheckpointError, prune, runs_under

    if keep_last < 1 and not everything:
        fail("--keep-last 0 would leave runs that cannot be gone on with; say --all if that is meant", 2)
    last, best = (0, 0) if everything else (keep_last, keep_best)
    freed, failed = 0, False
    try:
        folders = [folder for place in where for folder in runs_under(place)]
    except CheckpointError as error:
        fail(str(error))
    for folder in dict.fromkeys(folders):
        try:
            done = prune(folder, keep_last=last, keep_best=best, dry=dry_run)
        except (CheckpointError, OSError) as error:
            typer.secho(f"left alone: {error}", err=True)
            failed = True
            continue
        freed += done.freed
        if done.removed:
            left = ", ".join(str(view.step) for view in done.left) or "none"
            removed = ", ".join(str(view.step) for view in done.removed)
            typer.echo(f"{folder}: {'would remove' if dry_run else 'removed'} {removed}; left: {left}")
    typer.echo(f"{freed / 1e6:.1f} MB {'would be freed' if dry_run else 'freed'}")
    if failed:
        raise typer.Exit(1)


def _export_offline(
    where: Path, out: Path, step: int | None, adapter: bool, dtype: Dtype | None, model: str | None
) -> ExportView:
    """Raises:
    CheckpointError, OSError, ValueError: it cannot be exported as asked.
    """
    from importlib.util import find_spec

    from swarmtune.checkpoints import StoredRun, newest_run

    if (where / "trainer.json").is_file() or (where / "state.json").is_file():
        checkpoint = where
        if step is not None:
            fail("--step: only with a run; a checkpoint's folder is of one step", 2)
    else:
        checkpoint = Path(StoredRun.read(newest_run(where)).checkpoint(step).path)
    if find_spec("torch") is None:
        fail("exporting needs torch: pip install 'a3r[train]' (README.md), or ask a running server with --url")
    from swarmtune.trainer.export import export

    return export(checkpoint, out, model=model, adapter=adapter, dtype=dtype)


def _dtype(name: str | None) -> Dtype | None:
    if name not in (None, "bf16", "fp16", "fp32"):
        fail(f"--dtype {name}: unknown; known: bf16, fp16, fp32", 2)
    return cast("Dtype | None", name)


def connect(url: str, key: str | None, patience_s: float = PATIENCE_S) -> SwarmClient:
    from swarmtune.client import SwarmClient

    try:
        return SwarmClient(url, api_key=key, patience_s=patience_s)
    except ValueError as error:
        fail(f"--url {error}", 2)


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
