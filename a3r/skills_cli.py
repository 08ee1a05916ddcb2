"""`a3r skills`: list, show, check and install the skills for coding assistants, and try them with one."""

from __future__ import annotations

import datetime
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from a3r.skill_evals import Kind
    from a3r.skills import Skill

app = typer.Typer(
    help="Skills for coding assistants.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

FAILED, BAD_INPUT = 1, 2


@app.command("list")
def list_skills(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """The skills that come with a3r."""
    skills = _shipped()
    if as_json:
        print(
            json.dumps([{"name": s.name, "description": s.description, "path": str(s.file)} for s in skills], indent=1)
        )
        return
    width = max(len(s.name) for s in skills)
    for skill in skills:
        print(f"{skill.name:<{width}}  {skill.description.split('. ')[0].rstrip('.')}.")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A skill's name.")]) -> None:
    """Print a skill as an assistant reads it, and the files beside it."""
    skill = _named(name, _shipped())
    print(skill.file.read_text(encoding="utf-8"), end="")
    beside = [f for f in skill.files() if f.name != "SKILL.md"]
    print(f"\nfiles in {skill.folder}: {', '.join(map(str, beside)) or 'none'}")


@app.command()
def check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]…", help="Skills or folders of skills; default: those of a3r.")
    ] = None,
) -> None:
    """Check format, length, links, code blocks, quoted commands and options, and that no two skills say the same."""
    from a3r.skill_checks import check as check_all
    from a3r.skills import home

    skills, problems = check_all(paths or [home()])
    for problem in problems:
        print(problem)
    if problems:
        _fail(f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}", FAILED)
    print(f"{len(skills)} {'skill' if len(skills) == 1 else 'skills'}: good")


@app.command()
def install(
    for_: Annotated[str, typer.Option("--for", help="claude, opencode, codex, qwen, or all of them.")] = "all",
    project: Annotated[Path, typer.Option("--project", help="The folder the assistant works in.")] = Path("."),
    names: Annotated[list[str] | None, typer.Option("--skill", help="Only this one; may be repeated.")] = None,
    link: Annotated[bool, typer.Option("--link", help="Links to this installation instead of copies.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace folders that hold changes of yours.")] = False,
) -> None:
    """Put the skills where coding assistants look. Folders that hold something of yours are left alone."""
    from a3r.skill_install import CLAUDE_SETTING, FOLDERS, Action, InstallError, carry_out, mend, plan

    if for_ != "all" and for_ not in FOLDERS:
        _fail(f"--for {for_}: no such assistant; known: {', '.join(FOLDERS)}, all", BAD_INPUT)
    skills = _shipped() if not names else [_named(name, _shipped()) for name in names]
    assistants = list(FOLDERS) if for_ == "all" else [for_]
    try:
        mend(skills, project, assistants)
        steps = plan(skills, project, assistants, link=link, force=force)
        refused = [step for step in steps if step.action is Action.REFUSE]
        if refused:
            for step in refused:
                typer.echo(f"{step.target}: {step.action}", err=True)
            _fail(
                "nothing was installed; move these away, leave them out with --skill, or replace them with --force", 2
            )
        carry_out(steps, link=link, version=_version())
    except InstallError as error:
        _fail(str(error), BAD_INPUT)
    for assistant in assistants:
        counts = [
            f"{sum(s.action is action for s in steps if _is_in(s.target, project / FOLDERS[assistant]))} {action}"
            for action in Action
            if any(s.action is action and _is_in(s.target, project / FOLDERS[assistant]) for s in steps)
        ]
        print(f"{assistant:<9} {project / FOLDERS[assistant]}: {', '.join(counts) or 'the same folder by a link'}")
    if "claude" in assistants:
        print(f"Claude Code shows all descriptions with {json.dumps(CLAUDE_SETTING)} in .claude/settings.json")


@app.command("eval")
def evaluate(
    name: Annotated[str, typer.Argument(help="A skill's name, or all.")],
    command: Annotated[
        str,
        typer.Option("--command", help="The assistant's command line; the prompt replaces {prompt}, or is its input."),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Default: runs/<date>-skills, numbered.")] = None,
    only: Annotated[str, typer.Option("--only", help="triggers (with near misses), tasks, or all.")] = "all",
    limit_s: Annotated[
        float | None, typer.Option("--limit-s", min=1, help="Seconds for one task; default: what the task says.")
    ] = None,
) -> None:
    """Put a skill's requests and tasks to an assistant, and write a table. Status 0: all passed; 1: some did not."""
    from a3r.skill_evals import Case, Runner, command_line, table, write_table
    from a3r.strictyaml import FormatError

    kinds: dict[str, list[Kind]] = {"triggers": ["trigger", "near miss"], "tasks": ["task"]}
    kinds["all"] = kinds["triggers"] + kinds["tasks"]
    if only not in kinds:
        _fail(f"--only {only}: known: {', '.join(kinds)}", BAD_INPUT)
    skills = _shipped()
    wanted = skills if name == "all" else [_named(name, skills)]
    try:
        command_line(command)
    except ValueError as error:
        _fail(str(error), BAD_INPUT)
    folder = _empty_folder(out)

    def tell(case: Case) -> None:
        mark = "passed" if case.passed else "FAILED"
        print(f"{mark}  {case.name:<24} {case.answer or 'no name'}  {case.remark}".rstrip(), flush=True)

    try:
        runner = Runner(command, skills, folder, told=tell)
        results = {skill.name: runner.run(skill, kinds=kinds[only], limit_s=limit_s) for skill in wanted}
    except (FormatError, ValueError, OSError) as error:
        _fail(str(error), BAD_INPUT)
    write_table(results, command, folder)
    print(f"\n{table(results)}\n{folder / 'table.md'}")
    if not all(case.passed for cases in results.values() for case in cases):
        raise typer.Exit(FAILED)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _fail(message: str, code: int) -> NoReturn:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(code)


def _shipped() -> list[Skill]:
    from a3r.skills import shipped
    from a3r.strictyaml import FormatError

    try:
        return shipped()
    except (FormatError, FileNotFoundError) as error:
        _fail(str(error), FAILED)


def _named(name: str, skills: list[Skill]) -> Skill:
    import difflib

    for skill in skills:
        if skill.name == name:
            return skill
    near = difflib.get_close_matches(name, [s.name for s in skills], 3) or [s.name for s in skills]
    _fail(f"no skill {name!r}; did you mean: {', '.join(near)}", BAD_INPUT)


def _is_in(target: Path, folder: Path) -> bool:
    return target.parent == folder


def _version() -> str:
    try:
        return version("a3r")
    except PackageNotFoundError:
        return "unreleased"


def _empty_folder(out: Path | None) -> Path:
    """A folder that nothing was written to yet."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            _fail(f"--out {out} holds something already; name a new folder", BAD_INPUT)
        out.mkdir(parents=True, exist_ok=True)
        return out
    first = Path("runs") / f"{datetime.date.today():%Y-%m-%d}-skills"
    number = 1
    while (folder := first if number == 1 else first.with_name(f"{first.name}-{number}")).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder
