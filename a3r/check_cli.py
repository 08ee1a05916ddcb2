"""Commands that check files before anything runs: `goal check`, `blueprint check`, `report verify`, `schema export`.

Exit codes: 0 good, 1 something is wrong (each problem on a line: where, what, fix), 2 the goal has open questions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console

from a3r.blueprint import Blueprint, ClientSchemaError, client_schema, config_problems, load_blueprint
from a3r.compile import OpenQuestionsError, compile_goal, parse_answers
from a3r.goal import Goal, GoalLock
from a3r.leader import Decision, Plan
from a3r.results import RunRecord
from a3r.strictyaml import FormatError, Problem

goal_app = typer.Typer(no_args_is_help=True, help="Goals: goal.md and goal.lock.yaml.")
blueprint_app = typer.Typer(no_args_is_help=True, help="Blueprints: one arm of an experiment.")
report_app = typer.Typer(no_args_is_help=True, help="Reports of finished studies.")
schema_app = typer.Typer(no_args_is_help=True, help="JSON Schemas of the file formats.")

Files = Annotated[list[Path], typer.Argument(help="files to check", show_default=False)]
Root = Annotated[Path, typer.Option(help="directory in which clients run")]

FORMATS: dict[str, type[BaseModel]] = {
    "goal": Goal,
    "goal-lock": GoalLock,
    "blueprint": Blueprint,
    "result": RunRecord,
    "plan": Plan,
    "decision": Decision,
}


def _out() -> Console:
    return Console(highlight=False, soft_wrap=True)


@goal_app.command("check")
def check_goals(
    files: Files,
    root: Root = Path("."),
    set_: Annotated[list[str], typer.Option("--set", help="answer an open question: KEY=VALUE")] = [],  # noqa: B006
    show: Annotated[bool, typer.Option("--show/--quiet", help="print the compiled lock")] = False,
) -> None:
    """Compile goals as `a3r research` would, asking the client which keys it takes; write nothing."""
    worst = 0
    for path in files:
        try:
            lock = compile_goal(path, parse_answers(set_), root)
        except FormatError as error:
            _print_problems(error)
            worst = max(worst, 1)
        except OpenQuestionsError as error:
            _out().print(str(error), markup=False)
            worst = 1 if worst == 1 else 2
        else:
            question = lock.goal.question
            _out().print(
                f"{path}: good: {question.type} {question.factor}, {len(question.levels)} levels, "
                f"lock {lock.hash[:12]}, compiled by {lock.compiled_by}",
                markup=False,
            )
            for assumption in lock.assumptions:
                _out().print(f"  assumed: {assumption}", markup=False)
            if show:
                _out().print(lock.to_yaml(), markup=False)
    raise typer.Exit(worst)


@blueprint_app.command("check")
def check_blueprints(files: Files, root: Root = Path(".")) -> None:
    """Check structure, placeholders, and every configuration key against the client's own schema."""
    failed = False
    for path in files:
        try:
            blueprint = check_blueprint(path, root)
        except FormatError as error:
            _print_problems(error)
            failed = True
        else:
            _out().print(f"{path}: good: {blueprint.name}, id {blueprint.computed_id()[:19]}", markup=False)
    raise typer.Exit(int(failed))


def check_blueprint(path: Path, root: Path) -> Blueprint:
    """Load a blueprint and ask its client about its keys.

    Raises:
        FormatError: every problem found.
    """
    blueprint, document = load_blueprint(path)
    try:
        schema = client_schema(blueprint, root)
    except ClientSchemaError as error:
        where = document.where(("processes",))
        raise FormatError([Problem(where, str(error), "repair the client or the argv", key="processes")]) from None
    wrong = config_problems(blueprint.config, schema)
    if wrong:
        raise FormatError(
            Problem(document.where(_config_path(key, document.data)), problem, fix, key=f"config.{key}")
            for key, (problem, fix) in wrong.items()
        )
    return blueprint


def _config_path(key: str, data: object) -> tuple[str, ...]:
    """Where a dotted key stands in the file: as one key, or nested in sections."""
    config = data.get("config", {}) if isinstance(data, dict) else {}
    if isinstance(config, dict) and key in config:
        return ("config", key)
    return ("config", *key.split("."))


@report_app.command("verify")
def verify_report(directory: Annotated[Path, typer.Argument(help="a study's directory, or its report/")]) -> None:
    """Recompute every number from the run records and compare the report with it, byte by byte."""
    from a3r.report import VerifyError, verify

    try:
        found = verify(directory)
    except VerifyError as error:
        for line in str(error).splitlines():
            _out().print(line, markup=False)
        raise typer.Exit(1) from None
    _out().print(f"{directory}: {found.numbers} numbers from {found.runs} runs agree", markup=False)


@schema_app.command("export")
def export_schemas(
    directory: Annotated[Path | None, typer.Argument(help="where to write NAME.schema.json; default: print")] = None,
) -> None:
    """The JSON Schemas of goal, goal-lock, blueprint, result, plan, decision and report."""
    schemas = {name: model.model_json_schema(by_alias=True) for name, model in _formats().items()}
    if directory is None:
        print(json.dumps(schemas, indent=1))
        return
    directory.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas.items():
        (directory / f"{name}.schema.json").write_text(json.dumps(schema, indent=1) + "\n")
        _out().print(str(directory / f"{name}.schema.json"), markup=False)


def _formats() -> dict[str, type[BaseModel]]:
    from a3r.report import Report, StageReport

    return FORMATS | {"report": Report, "stage-report": StageReport}


def _print_problems(error: FormatError) -> None:
    for problem in error.problems:
        _out().print(str(problem), markup=False)
