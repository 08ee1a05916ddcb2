"""`a3r bench`: which commit made training slower, hungrier or worse.

    a3r bench run HEAD | NEW | ALL | A..B [--steps N] [--suite speed]
    a3r bench nightly [--at 02:00 | --once]
    a3r bench compare A B     a3r bench report     a3r bench bisect [GOOD BAD]

Exit status: 0 fine, 1 a regression is confirmed, 2 could not measure (or the input is wrong), 3 undecided.
"""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from a3r.bench.nightly import Night
    from a3r.bench.session import Series, Session
    from a3r.bench.verdicts import Change

app = typer.Typer(
    help="Benchmarks of training across git commits.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

NOT_MEASURED = 2
DEFAULT_DIR = Path("runs") / "bench"

SuiteOption = Annotated[
    list[str] | None, typer.Option("--suite", help="A suite's name or file; default: every one in blueprints/suites.")
]
TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Only these tasks of the suites.")]
DirOption = Annotated[Path, typer.Option("--dir", help="Where results live; keep it in git or an object store.")]
RepoOption = Annotated[Path, typer.Option("--repo", help="The project.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command()
def run(
    what: Annotated[str, typer.Argument(help="HEAD, NEW, ALL, A..B, or one commit.")] = "HEAD",
    commits: Annotated[str | None, typer.Option("--commits", help="The same as the argument.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Only so many commits, spread evenly.")] = None,
    suite: SuiteOption = None,
    only: TaskOption = None,
    directory: DirOption = DEFAULT_DIR,
    repo: RepoOption = Path("."),
    dirty: Annotated[bool, typer.Option("--dirty", help="Measure HEAD with the uncommitted changes.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure again what could not be measured.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure commits that have no results yet, and judge them."""
    from a3r.bench.report import markdown

    with _session(suite, only, directory, repo) as session:
        spec = commits or what
        patch = _patch_for(session, spec, dirty)
        selection = session.history.select(spec, steps, lambda c: all(session.settled(s, c) for s in session.suites))
        if retry:
            for loaded in session.suites:
                for commit in selection.wanted:
                    session.results.discard_failures(
                        loaded.id, session.representative(loaded, commit, selection.history)
                    )
        summary = session.run(selection, patch)
        if as_json:
            print(json.dumps(_summary_json(summary), indent=1))
        else:
            print(markdown(session, summary, selection.history, _confirmed(session, summary)))
        raise typer.Exit(int(summary.exit))


@app.command()
def nightly(
    at: Annotated[str, typer.Option("--at", help="Time of day, local.")] = "02:00",
    once: Annotated[bool, typer.Option("--once", help="One night now, then end with its exit status.")] = False,
    suite: SuiteOption = None,
    only: TaskOption = None,
    directory: DirOption = DEFAULT_DIR,
    repo: RepoOption = Path("."),
    branch: Annotated[
        str | None, typer.Option("--branch", help="Measure this branch; default: what is checked out.")
    ] = None,
) -> None:
    """Measure every night's new commits. Runs until interrupted; a missed night is made up for at the start."""
    from a3r.bench.nightly import BadTime, Nights, parse_time
    from a3r.bench.store import Busy, Results

    results = Results(directory)
    try:
        nights = Nights(results, parse_time(at), lambda: _one_night(suite, only, directory, repo, branch or "HEAD"))
        with results.exclusive("nightly"):
            if once:
                night = nights.run_once()
                print(night.markdown)
                raise typer.Exit(int(night.exit))
            _say(f"every night at {at}; results in {directory}")
            nights.serve(lambda night: _say(night.markdown))
    except (Busy, BadTime) as error:
        _fail(str(error))
    except (KeyboardInterrupt, SystemExit):
        _say("stopped")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A commit.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    suite: SuiteOption = None,
    only: TaskOption = None,
    directory: DirOption = DEFAULT_DIR,
    repo: RepoOption = Path("."),
    as_json: JsonOption = False,
) -> None:
    """Two commits side by side, by the results there are."""
    from rich.console import Console
    from rich.table import Table

    from a3r.bench.compare import compare as compared
    from a3r.bench.session import short

    with _session(suite, only, directory, repo, exclusive=False) as session:
        first, second = session.history.resolve(a), session.history.resolve(b)
        rows = compared(session, first, second)
    if not rows:
        _fail(
            f"no suite has results of both {a} and {b}; measure them with `a3r bench run {a}` and `a3r bench run {b}`"
        )
    if as_json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
        return
    table = Table(box=None, header_style="dim")
    for title in ("task", "metric", "n", short(first), short(second), "difference (95 %)", ""):
        table.add_column(title, no_wrap=title == "metric")
    for row in rows:
        interval = f" [{row.low:+.3g}, {row.high:+.3g}]" if row.low is not None and row.high is not None else ""
        table.add_row(
            f"{row.suite}/{row.task}", f"{row.metric} {row.unit}".strip(), f"{row.n[0]}, {row.n[1]}", f"{row.a:.4g}",
            f"{row.b:.4g}", f"{row.difference:+.3g}{interval}", row.verdict,
        )  # fmt: skip
    Console(highlight=False).print(table)


@app.command()
def report(
    suite: SuiteOption = None,
    only: TaskOption = None,
    directory: DirOption = DEFAULT_DIR,
    repo: RepoOption = Path("."),
    out: Annotated[Path | None, typer.Option("--out", help="Folder; default: report/ in --dir.")] = None,
    tip: Annotated[str, typer.Option("--tip", help="Whose history is shown.")] = "HEAD",
) -> None:
    """Write report.html (self-contained), report.md, report.json and a badge."""
    from a3r.bench.report import write

    with _session(suite, only, directory, repo, exclusive=False) as session:
        history = session.history.first_parents(session.history.resolve(tip))
        target = out or directory / "report"
        data = write(session, history, target, shlex.join(["a3r", *sys.argv[1:]]))
    print(f"{data['sentence']} {target / 'report.html'}")


@app.command()
def bisect(
    good: Annotated[
        str | None, typer.Argument(help="A commit before the change; default: from the last confirmed one.")
    ] = None,
    bad: Annotated[str | None, typer.Argument(help="A commit with it.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric; default: the only one, or the confirmed one.")] = None,
    suite: SuiteOption = None,
    only: TaskOption = None,
    directory: DirOption = DEFAULT_DIR,
    repo: RepoOption = Path("."),
) -> None:
    """Find the commit of a confirmed regression, or of the change between two commits, by fresh runs."""
    from a3r.bench.session import Exit, note_bisection, short
    from a3r.bench.verdicts import Change, Outcome

    with _session(suite, only, directory, repo) as session:
        session.measurer.tidy()
        if good is not None:
            base, head = session.history.resolve(good), session.history.resolve(bad or "HEAD")
            series = _one_series(session, session.history.first_parents(head), metric)
            session.between(series.suite, base, head)
            finding = session.compare_fresh(series, base, head, Change.REGRESSION)
            if finding.outcome is not Outcome.CONFIRMED:
                print(
                    f"{series.task.name} {series.name}: no regression between {good} and {bad or 'HEAD'} is confirmed"
                )
                waits = finding.outcome is Outcome.PENDING
                raise typer.Exit(int(Exit.NOT_MEASURED if waits else Exit.UNDECIDED))
        else:
            series, finding = _last_confirmed(session, metric, Change.REGRESSION)
        commit, located = session.bisect(series, finding)
        info = session.history.info(commit)
        words = f"{series.task.name} {series.name}: {short(commit)} {info.subject} ({info.author})"
        chance = f"probability {located.probability:.3f}, {located.runs} runs"
        if not located.sure:
            print(f"undecided; likeliest {words}, {chance}")
            raise typer.Exit(int(Exit.UNDECIDED))
        note_bisection(session.results, series, finding, commit, located)
        print(f"{words}, {chance}")
        raise typer.Exit(int(Exit.REGRESSION))


# ---- helpers ---------------------------------------------------------------------------------------------------------


@contextmanager
def _session(
    suite: list[str] | None, only: list[str] | None, directory: Path, repo: Path, exclusive: bool = True
) -> Iterator[Session]:
    """Everything opened, with one place where what is wrong with the input becomes a message and exit status 2."""
    from contextlib import ExitStack

    from a3r.bench.commits import CommitError, History
    from a3r.bench.session import Session
    from a3r.bench.store import Busy, Results
    from a3r.bench.suites import find_suites, only_tasks
    from a3r.strictyaml import FormatError

    try:
        history = History(repo)
        results = Results(directory)
        with ExitStack() as stack:
            if exclusive:
                stack.enter_context(results.exclusive())
            yield Session(history, results, only_tasks(find_suites(suite or [], history.root), only or []), say=_say)
    except (CommitError, Busy) as error:
        _fail(str(error))
    except FormatError as error:
        _fail("\n".join(str(p) for p in error.problems))
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on")
        raise typer.Exit(130) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - Python's exit status 1 would read as a confirmed regression
        traceback.print_exc()
        _fail(f"{type(error).__name__}: {error}")


def _patch_for(session: Session, spec: str, dirty: bool) -> bytes:
    """The uncommitted changes where they are asked for. HEAD alone means what one has: a dirty tree is refused then."""
    from a3r.bench.commits import CommitError

    patch = session.history.dirty_patch()
    if dirty and spec != "HEAD":
        raise CommitError(f"--dirty measures HEAD with the changes on top, not {spec}; leave one of them out")
    if patch and spec == "HEAD" and not dirty:
        raise CommitError(
            "tracked files have uncommitted changes; commit them, or give --dirty to measure HEAD with them"
        )
    return patch if dirty else b""


def _one_night(suite: list[str] | None, only: list[str] | None, directory: Path, repo: Path, branch: str) -> Night:
    """Measure what is new, write the report, and sum it up."""
    from a3r.bench.nightly import Night
    from a3r.bench.report import markdown, write

    with _session(suite, only, directory, repo) as session:
        selection = session.history.select(
            "NEW", None, lambda c: all(session.settled(s, c) for s in session.suites), tip=branch
        )
        summary = session.run(selection)
        data = write(session, selection.history, directory / "report", shlex.join(["a3r", *sys.argv[1:]]))
        text = markdown(session, summary, selection.history, data["incidents"])
        return Night(summary.exit, selection.wanted, text)


def _confirmed(session: Session, summary) -> list[dict]:
    from a3r.bench.report import incident_facts, incidents_of

    found = []
    for verdict in summary.verdicts:
        for series, finding in verdict.confirmed:
            found += [incident_facts(session, i) for i in incidents_of(session, series) if i.finding == finding]
    return found


def _one_series(session: Session, history, metric: str | None) -> Series:
    """The series that --task and --metric name, or the only one."""
    from a3r.bench.commits import CommitError

    every = [s for loaded in session.suites for s in session.series(loaded, history)]
    named = [s for s in every if metric in (None, s.name)]
    if len(named) != 1:
        names = ", ".join(f"{s.suite.name}/{s.task.name} {s.name}" for s in every)
        raise CommitError(f"{len(named)} metrics are meant; name one with --suite, --task and --metric: {names}")
    return named[0]


def _last_confirmed(session: Session, metric: str | None, change: Change):
    """The newest confirmed regression on the checked-out history."""
    from a3r.bench.commits import CommitError
    from a3r.bench.verdicts import Outcome

    history = session.history.first_parents(session.history.resolve("HEAD"))
    found = [
        (history.index(f.commit), s, f)
        for loaded in session.suites
        for s in session.series(loaded, history)
        if metric in (None, s.name)
        for f in s.findings
        if f.outcome is Outcome.CONFIRMED and f.change is change
    ]
    if not found:
        raise CommitError("no confirmed regression in the results; give a good and a bad commit")
    return max(found, key=lambda row: row[0])[1:]


def _summary_json(summary) -> dict:
    return {
        "schema": "a3r/bench-summary/v1",
        "exit": int(summary.exit),
        "commits": [{"commit": v.commit, "exit": int(v.exit), "reasons": list(v.reasons)} for v in summary.verdicts],
    }


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _fail(message: str) -> NoReturn:
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(NOT_MEASURED)
