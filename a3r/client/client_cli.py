"""`a3r client`: write a client project, and check one.

Exit status of `check`: 0 every check passed, 1 one failed, 2 there is no project to check.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Client projects: write one, check one.", no_args_is_help=True)

_BAD_INPUT = 2


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens, beginning with a letter.")],
    parent: Annotated[Path, typer.Option("--dir", help="The folder in which the project's folder is made.")] = Path(
        "."
    ),
) -> None:
    """Write a small, complete client project that passes `a3r client check`."""
    from a3r.client.new import CannotWrite, write_project

    try:
        folder = write_project(name, parent)
    except CannotWrite as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_BAD_INPUT) from None
    typer.echo(f"{folder}: README.md says what each file is; `a3r client check {folder}` plays it")


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder with train.py.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds for an import, and for one episode.")] = 30.0,
    episodes: Annotated[int, typer.Option(min=8, help="Episodes per policy.")] = 64,
    network: Annotated[bool, typer.Option("--network", help="Let the project reach other machines.")] = False,
) -> None:
    """Play a client project on scripted answers and refuse a reward that is won without understanding."""
    from a3r.client.check import NotAProject, Options, check_project

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the project's processes end with us
    try:
        report = check_project(folder, Options(limit, episodes, network))
    except NotAProject as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_BAD_INPUT) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        for result in report.results:
            typer.echo(_printable(f"{result.verdict.value:<8} {result.check:<10} {result.sentence}"))
            if transcript := result.details.get("transcript"):
                typer.echo("\n".join(f"    {_printable(line)}" for line in transcript.splitlines()))
    raise typer.Exit(0 if report.ok else 1)


def _printable(line: str) -> str:
    """What a project or a model said may hold sequences that command a terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", line)
