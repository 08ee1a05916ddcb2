"""The `a3r` command.

    a3r research goal.md        run a study, or go on with it after anything
    a3r status | show RUN | why RUN | cost | attach RUN
    a3r approve | pause | resume | stop

Commands reach a running study through files in its inbox, so they work from any terminal. Exit status of `research`:
0 done, 1 an error, 2 the goal or the options are wrong, 3 the goal has open questions, 4 a person is needed, 5 another
leader is running.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Plans, runs and reports whole training studies.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)

DirOption = Annotated[Path | None, typer.Option("--dir", help="The study's directory; default: the latest in runs/.")]
RunName = Annotated[str, typer.Argument(help="A run, as shown by `a3r status`: ARM/sSEED.")]

ERROR, BAD_INPUT, OPEN_QUESTIONS, NEEDS_HUMAN, LEADER_RUNNING = 1, 2, 3, 4, 5


def main() -> None:
    whole()()


@cache
def whole() -> typer.Typer:
    """The command with all its parts; they are loaded here, so that one part can be imported without the others."""
    from a3r.bench.bench_cli import app as bench_app
    from a3r.check_cli import blueprint_app, goal_app, report_app, schema_app
    from a3r.client.client_cli import app as client_app
    from a3r.models_cli import app as models_app
    from a3r.skills_cli import app as skills_app

    for name, sub in (
        ("goal", goal_app),
        ("blueprint", blueprint_app),
        ("report", report_app),
        ("schema", schema_app),
        ("models", models_app),
        ("client", client_app),
        ("bench", bench_app),
        ("skills", skills_app),
    ):
        app.add_typer(sub, name=name)
    return app


def fail(message: str, code: int = ERROR) -> NoReturn:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(code)


# ---- research --------------------------------------------------------------------------------------------------------


@app.command()
def research(
    goal: Annotated[Path, typer.Argument(help="goal.md; or the directory of a study, to go on with it")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Where the study lives; default runs/<goal>.")] = None,
    leader: Annotated[str, typer.Option(help="adaptive (no model needed) or llm.")] = "adaptive",
    model: Annotated[str | None, typer.Option(help="llm: the model's name.")] = None,
    base_url: Annotated[str | None, typer.Option(help="llm: an OpenAI-compatible endpoint.")] = None,
    hosts: Annotated[Path | None, typer.Option(help="hosts.yaml; default: this machine.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Answer an open question: KEY=VALUE.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Approve the plan without asking.")] = False,
    view: Annotated[bool, typer.Option("--windows/--no-windows", help="Show each process in a tmux window.")] = True,
) -> None:
    """Run a study from a goal to a report. The same command goes on after a crash, a reboot or Ctrl-C."""
    from rich.console import Console

    from a3r.attempts import Settings
    from a3r.campaign import CampaignError, LeaderRunning
    from a3r.compile import OpenQuestionsError, parse_answers
    from a3r.hosts import load_hosts
    from a3r.research import LeaderOptions, UsageError, open_study, prepare
    from a3r.store import DiskFull, JournalDamaged
    from a3r.strictyaml import FormatError

    console = Console(highlight=False)
    try:
        options = LeaderOptions(leader, model, base_url).checked()
        target, lock = prepare(goal, directory, options, hosts, parse_answers(set_ or []), Path.cwd())
        announce(console, target, lock)
        settings = Settings(view=view, approve_all=yes or approved_by_hand(console, target, lock))
        study = open_study(target, settings, load_hosts(hosts) if hosts else None)
    except FormatError as error:
        fail("\n".join(str(p) for p in error.problems), BAD_INPUT)
    except OpenQuestionsError as error:
        fail(str(error), OPEN_QUESTIONS)
    except LeaderRunning as error:
        fail(str(error), LEADER_RUNNING)
    except (UsageError, CampaignError, JournalDamaged, DiskFull, ValueError) as error:
        fail(str(error), BAD_INPUT)
    lead(console, study)


def announce(console, target: Path, lock) -> None:
    """The compiled goal: the whole lock the first time, a line later."""
    if (target / "stages" / "00").exists():
        console.print(f"going on with {target}", markup=False)
        return
    question = lock.goal.question
    console.print(f"{lock.goal.title}  ({target})", markup=False)
    console.print(f"  {question.type} {question.factor} of {', '.join(map(str, question.levels))}", markup=False)
    for assumption in lock.assumptions:
        console.print(f"  assumed: {assumption}", markup=False)
    console.print(f"  {target / 'goal.lock.yaml'}, hash {lock.hash[:12]}", markup=False)


def approved_by_hand(console, target: Path, lock) -> bool:
    """Ask at a terminal. Elsewhere the study waits for `a3r approve`."""
    if lock.goal.hitl.approve == "none" or not sys.stdin.isatty() or (target / "stages" / "00").exists():
        return False
    console.print(lock.to_yaml(), markup=False)
    if not typer.confirm("Start this study?", default=True):
        fail("not started; edit the goal and run the command again", BAD_INPUT)
    drop(target, f"approve-{lock.hash}", {})
    return False


def lead(console, study) -> NoReturn:
    """Run to the end, show it, and say how it ended."""
    from a3r.live import viewing

    try:
        with viewing(console) as look:
            state = study.run(look)
        code = conclude(console, study, state)
    except KeyboardInterrupt:
        study.leave()
        console.print(
            f"\nleft; runs that are under way go on by themselves. `a3r research {study.directory}` goes on, "
            f"`a3r stop --dir {study.directory}` ends it",
            markup=False,
        )
        code = 130
    finally:
        study.close()
    raise typer.Exit(code)


def conclude(console, study, state: str) -> int:
    """The answer in one sentence, the table, and where the report is."""
    from a3r.live import grid
    from a3r.snapshot import take

    if state != "DONE":
        hold = study.hold or {"reason": "unknown"}
        console.print(f"a person is needed: {hold['reason']}", style="yellow", markup=False)
        console.print(f"then: a3r resume --dir {study.directory}", markup=False)
        return NEEDS_HUMAN
    decision = study.decision()
    if decision is not None:
        console.print()
        console.print(f"{decision.verdict.value}: {decision.sentence}", style="bold", markup=False)
    console.print(grid(take(study.directory, study.store)))
    report = study.directory / "report" / "report.html"
    if report.exists():
        console.print(f"report: {report}", markup=False, soft_wrap=True)
    return 0


# ---- looking ---------------------------------------------------------------------------------------------------------


@app.command()
def status(directory: DirOption = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Stages, runs, rewards, budget, and what the study waits for."""
    from dataclasses import asdict

    from rich.console import Console

    from a3r.campaign import leader_is_running
    from a3r.live import render
    from a3r.snapshot import take

    where, store = reading(directory)
    snap = take(where, store)
    alive = leader_is_running(where)
    if as_json:
        facts = asdict(snap) | {"plans": [p.title for p in snap.plans], "arms": sorted(snap.arms), "leader": alive}
        facts["decision"] = snap.decision and snap.decision.sentence
        print(json.dumps(facts, indent=1, default=str))
        return
    console = Console(highlight=False)
    console.print(render(snap))
    if not alive and snap.state != "DONE":
        console.print(f"no leader is running: a3r research {where}", style="yellow", markup=False)
    if snap.decision:
        console.print(snap.decision.sentence, style="bold", markup=False)


@app.command()
def show(run: RunName, directory: DirOption = None) -> None:
    """One run: its attempts, files and the end of its logs."""
    from a3r import supervisor as sv

    where, store = reading(directory)
    row = find_run(store, run)
    print(f"{row['run']}  {row['state']}  stage {row['stage']}  seed {row['seed']}  blueprint {row['blueprint'][:19]}")
    for attempt in (a for a in store.table("attempts").values() if a["run"] == row["run"]):
        kind = f"  {attempt['class']}: {attempt.get('detail', '')}" if attempt["class"] else ""
        print(f"  attempt {attempt['n']}  {attempt['state']}  {attempt['host']} {' '.join(attempt['slots'])}{kind}")
    folder = where / "runs" / row["run"] / "attempts" / str(row["attempt"])
    print(f"  files: {folder}")
    for log in sorted(folder.glob("log/*.txt")):
        print(f"--- {log.name}")
        print("\n".join(sv.tail(log, 4096).splitlines()[-15:]))


@app.command()
def why(run: RunName, directory: DirOption = None) -> None:
    """Why a run is in the state it is in: everything that happened to it."""
    from a3r.snapshot import why_run

    where, store = reading(directory)
    print("\n".join(why_run(where, store, find_run(store, run)["run"])))


@app.command()
def cost(directory: DirOption = None) -> None:
    """What the study has used, and what it may use."""
    from a3r.live import budget_words
    from a3r.snapshot import take

    where, store = reading(directory)
    lines = take(where, store).budget
    print("\n".join(map(budget_words, lines)) or "nothing yet")


@app.command()
def attach(run: RunName, directory: DirOption = None) -> None:
    """Open the tmux windows of a run. Leave them with Ctrl-b d; closing them stops nothing."""
    from a3r.blueprint import Blueprint
    from a3r.executor import Handle, make_executor
    from a3r.hosts import Hosts

    where, store = reading(directory)
    row = find_run(store, run)
    attempt = store.row("attempts", f"{row['run']}#{row['attempt']}")
    if attempt is None:
        fail(f"{row['run']} has not been started: {row['state'].lower()}")
    hosts = Hosts.model_validate_json(json.dumps((store.row("campaign", "facts") or {})["hosts"]))
    host = hosts.named(attempt["host"])
    executor = make_executor(host.executor, where)
    folder = where / "runs" / row["run"] / "attempts" / str(attempt["n"])
    handle = Handle(row["run"], attempt["n"], attempt["nonce"], folder, host)
    blueprint = Blueprint.model_validate_json(json.dumps((store.row("arms", row["arm"]) or {})["blueprint"]))
    warning = executor.open_view(handle, [p.name for p in blueprint.start_order()])
    if warning:
        fail(warning)
    argv = executor.attach_argv(handle)
    os.execvp(argv[0], argv)


# ---- acting ----------------------------------------------------------------------------------------------------------


@app.command()
def approve(
    digest: Annotated[str | None, typer.Argument(metavar="[HASH]", help="Default: what waits for approval.")] = None,
    directory: DirOption = None,
) -> None:
    """Approve the goal or the stage that waits; the hash makes sure that it is the one you looked at."""
    from a3r.snapshot import take

    where, store = reading(directory)
    waiting = take(where, store).waiting_hash
    if waiting is None:
        fail("nothing waits for approval", BAD_INPUT)
    if digest and not waiting.startswith(digest):
        fail(f"what waits has the hash {waiting[:12]}, not {digest}; look at it again", BAD_INPUT)
    command(where, f"approve-{waiting}", {})


@app.command()
def pause(
    directory: DirOption = None,
    now: Annotated[bool, typer.Option("--now", help="Also stop what runs; it goes on from its checkpoint.")] = False,
    drain: Annotated[bool, typer.Option("--drain", help="Wait until what runs has ended.")] = False,
    reason: Annotated[str, typer.Option(help="Shown in the status.")] = "by hand",
) -> None:
    """Start nothing new until `a3r resume`."""
    where, _ = reading(directory)
    command(where, "pause", {"now": now, "reason": reason})
    while drain and running(where):
        time.sleep(1.0)


@app.command()
def resume(directory: DirOption = None) -> None:
    """Go on after a pause, or after what a person was needed for; leads the study where no leader runs."""
    from rich.console import Console

    from a3r.attempts import Settings
    from a3r.campaign import leader_is_running
    from a3r.research import open_study

    where, _ = reading(directory)
    drop(where, "resume", {})
    if leader_is_running(where):
        print("resumed")
        return
    lead(Console(highlight=False), open_study(where, Settings()))


@app.command()
def stop(
    directory: DirOption = None,
    reason: Annotated[str, typer.Option(help="Goes into the report.")] = "stopped by hand",
) -> None:
    """End the study with a partial report; what runs is stopped. Leads it to its end where no leader runs."""
    from rich.console import Console

    from a3r.attempts import Settings
    from a3r.campaign import leader_is_running
    from a3r.research import open_study
    from a3r.snapshot import take

    where, store = reading(directory)
    if take(where, store).state == "DONE":
        print("the study is done")
        return
    if leader_is_running(where):
        command(where, "stop", {"reason": reason})
        return
    drop(where, "stop", {"reason": reason})
    lead(Console(highlight=False), open_study(where, Settings(view=False)))


# ---- helpers ---------------------------------------------------------------------------------------------------------


def latest_study() -> Path:
    """The study in runs/ whose journal changed last."""
    found = sorted(Path("runs").glob("*/journal.db"), key=lambda p: p.stat().st_mtime)
    if not found:
        fail("no study in runs/: give --dir, or start one with `a3r research goal.md`", BAD_INPUT)
    return found[-1].parent


def reading(directory: Path | None):
    """(directory, read-only journal) of a study."""
    from a3r.store import Store

    where = directory or latest_study()
    try:
        return where, Store.open_read_only(where)
    except FileNotFoundError as error:
        fail(str(error), BAD_INPUT)


def find_run(store, name: str) -> dict:
    """A run by its name or an unambiguous beginning of it."""
    import difflib

    runs = store.table("runs")
    if name in runs:
        return runs[name]
    matches = [r for r in runs if r.startswith(name)]
    if len(matches) == 1:
        return runs[matches[0]]
    near = difflib.get_close_matches(name, runs, n=3) or matches[:5] or list(runs)[:5]
    fail(f"no run {name!r}; did you mean: {', '.join(near) or 'there are none yet'}", BAD_INPUT)


def drop(where: Path, name: str, details: dict) -> None:
    """Put a command into a study's inbox, whole or not at all."""
    inbox = where / "inbox"
    inbox.mkdir(exist_ok=True)
    part = inbox / f".{name}.{os.getpid()}"
    part.write_text(json.dumps(details), encoding="utf-8")
    part.replace(inbox / name)


def command(where: Path, name: str, details: dict) -> None:
    """Drop a command and, where a leader runs, wait until it has taken it."""
    from a3r.campaign import leader_is_running

    drop(where, name, details)
    if not leader_is_running(where):
        print(f"noted; no leader is running, it takes effect with `a3r research {where}`")
        return
    deadline = time.monotonic() + 10.0
    while (where / "inbox" / name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    taken = not (where / "inbox" / name).exists()
    print(f"{name.partition('-')[0]}: {'done' if taken else 'noted, the leader is busy'}")


def running(where: Path) -> int:
    from a3r.store import Store

    store = Store.open_read_only(where)
    try:
        return sum(r["state"] == "RUNNING" for r in store.table("runs").values())
    finally:
        store.close()


if __name__ == "__main__":
    main()
