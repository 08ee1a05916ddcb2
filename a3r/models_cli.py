"""`a3r models`: list and fetch the models that have a name here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swarmtune import models

app = typer.Typer(help="Models by name: list, fetch, locate.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Catalogue name, local folder or hub id.")]


@app.command("list")
def list_models() -> None:
    """Names of the catalogue and whether each is on this machine."""
    catalogue = models.Catalogue()
    for entry in models.ENTRIES.values():
        state = "ready" if catalogue.is_ready(entry.name) else f"not here ({entry.download_mb} MB to download)"
        typer.echo(f"{entry.name:<14} {state:<32} {entry.about}")


@app.command()
def get(name: Name) -> None:
    """Fetch a model if it is not here yet, and print its folder. May be interrupted and run again."""
    try:
        typer.echo(models.resolve(name, progress=_say))
    except models.ModelError as error:
        _say(str(error))
        raise typer.Exit(2) from None


@app.command()
def path(name: Name) -> None:
    """Print the folder of a catalogue model that is here; fetch nothing."""
    catalogue = models.Catalogue()
    try:
        ready = catalogue.is_ready(name)
    except models.ModelNotFound as error:
        _say(str(error))
        raise typer.Exit(2) from None
    if not ready:
        _say(f"{name} is not here: a3r models get {name}")
        raise typer.Exit(1)
    typer.echo(catalogue.folder(name))


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
