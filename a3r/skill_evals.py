"""Does a skill do its work? Requests and tasks from its evals/evals.yaml, put to any assistant that has a command line.

    triggers:                       # requests for which an assistant should open this skill
      - My reward does not move …
    near_misses:                    # requests that sound alike, and the skill that is the right one (or none)
      - {request: …, instead: design-reward}
    tasks:                          # work to carry out in a folder of its own
      - name: first-client
        request: …
        files: {notes.md: …}        # what the folder holds before
        check: a3r client check .   # decides, by its exit status; $EVALS is the skill's evals folder
        reference: …                # a shell script that solves the task: tests prove by it that the check can pass
        limit_s: 600

How a trigger is judged with any assistant: it is shown name and description of every skill and the request, and asked
to answer with one name. The last skill name (or `none`) in its output is its answer. A task's prompt is the request and
the place of the skill, installed in the task's folder for every assistant. The prompt goes to standard input, or into
the arguments where the command says {prompt}.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from a3r.formats import Part, Seconds, parse_model
from a3r.skill_install import FOLDERS, carry_out, plan
from a3r.skills import Skill
from a3r.strictyaml import FormatError, Problem, load_strict

NONE = "none"
CHOICE_LIMIT_S = 120.0
CHECK_LIMIT_S = 300.0
MOST_OUTPUT = 20_000_000
"""Bytes that a program may print before it is ended."""
MIN_REQUESTS, MIN_TASKS = 5, 2

Text = Annotated[str, Field(min_length=1)]
Kind = Literal["trigger", "near miss", "task"]


class NearMiss(Part):
    request: Text
    instead: Text = NONE
    """The skill that should be opened."""


class Task(Part):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    request: Text
    files: dict[str, str] = Field(default_factory=dict)
    check: Text
    reference: str = ""
    limit_s: Seconds = 900.0


class Evals(Part):
    triggers: list[Text]
    near_misses: list[NearMiss]
    tasks: list[Task]


@dataclass(frozen=True)
class Case:
    """One request, and what came of it."""

    kind: Kind
    name: str
    request: str
    expected: str
    answer: str
    passed: bool
    remark: str = ""


def load_evals(skill: Skill, known: Iterable[str] = ()) -> Evals:
    """The evals of a skill.

    Args:
        known: names that near misses may point to; empty asks for nothing.

    Raises:
        FormatError: they are missing, malformed or too few.
    """
    path = skill.folder / "evals" / "evals.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(
            [Problem(str(path), f"cannot be read: {error}", "write triggers, near_misses, tasks")]
        ) from None
    document = load_strict(text, str(path))
    evals = parse_model(Evals, document)
    names = {*known, NONE}
    problems = [
        Problem(
            document.where(("near_misses", at, "instead")),
            f"no other skill {miss.instead!r}",
            "name another one, or none",
        )
        for at, miss in enumerate(evals.near_misses)
        if len(names) > 1 and (miss.instead not in names or miss.instead == skill.name)
    ]
    for key, found, least in (
        ("triggers", evals.triggers, MIN_REQUESTS),
        ("near_misses", evals.near_misses, MIN_REQUESTS),
        ("tasks", evals.tasks, MIN_TASKS),
    ):
        if len(found) < least:
            problems.append(
                Problem(document.where((key,)), f"{len(found)} of them", f"write at least {least}", key=key)
            )
    if problems:
        raise FormatError(problems)
    return evals


# ---- putting them to an assistant ------------------------------------------------------------------------------------


class Runner:
    """Puts the cases of skills to one assistant, and keeps everything it said under `out`."""

    def __init__(self, command: str, skills: Sequence[Skill], out: Path, *, told: Callable[[Case], None]) -> None:
        """Raises:
        ValueError: the command cannot be split into words, or its program is not there.
        """
        self._argv = command_line(command)
        self._skills = skills
        self._out = out.resolve()
        self._told = told

    def run(self, skill: Skill, *, kinds: Sequence[Kind], limit_s: float | None = None) -> list[Case]:
        """All cases of a skill, in order."""
        evals = load_evals(skill, [s.name for s in self._skills])
        cases: list[Case] = []
        if "trigger" in kinds:
            cases += [self._choose(skill, "trigger", at, r, skill.name) for at, r in enumerate(evals.triggers, 1)]
        if "near miss" in kinds:
            cases += [
                self._choose(skill, "near miss", at, miss.request, miss.instead)
                for at, miss in enumerate(evals.near_misses, 1)
            ]
        if "task" in kinds:
            cases += [self._carry_out(skill, task, limit_s or task.limit_s) for task in evals.tasks]
        return cases

    def _choose(self, skill: Skill, kind: Kind, at: int, request: str, expected: str) -> Case:
        name = f"{kind.replace(' ', '-')}-{at}"
        folder = self._fresh(skill, name)
        said, status = self._ask(choice_prompt(self._skills, request), folder, folder, CHOICE_LIMIT_S)
        answer = chosen(said, [s.name for s in self._skills])
        remark = "" if status == 0 else _ended(status)
        case = Case(kind, name, request, expected, answer, answer == expected and status == 0, remark)
        self._told(case)
        return case

    def _carry_out(self, skill: Skill, task: Task, limit_s: float) -> Case:
        outside = self._fresh(skill, f"task-{task.name}")
        folder = outside / "folder"
        prepare_folder(folder, task)
        steps = plan([skill], folder, list(FOLDERS), link=False, force=False)
        carry_out(steps, link=False, version="eval")
        _, status = self._ask(task_prompt(skill, task), folder, outside, limit_s)
        passed, words = decide(task, skill, folder)
        (outside / "check.txt").write_text(words, encoding="utf-8")
        last = (words.strip().splitlines() or ["the check said nothing"])[-1]
        remark = last if status == 0 else f"{_ended(status)}; {last}"
        case = Case("task", task.name, task.request, "check passes", "passes" if passed else "fails", passed, remark)
        self._told(case)
        return case

    def _fresh(self, skill: Skill, name: str) -> Path:
        folder = self._out / skill.name / name
        folder.mkdir(parents=True)
        return folder

    def _ask(self, prompt: str, folder: Path, keep: Path, limit_s: float) -> tuple[str, int | None]:
        """(what it said, exit status; None when it was stopped at the limit)."""
        (keep / "prompt.txt").write_text(prompt, encoding="utf-8")
        argv = [word.replace("{prompt}", prompt) for word in self._argv]
        said, status = run_bounded(argv, folder, None if argv != self._argv else prompt, limit_s, keep)
        return said, status


def command_line(command: str) -> list[str]:
    """The words of an assistant's command line, its program as a full path: it is started in other folders.

    Raises:
        ValueError: it has no words, an open quotation, or a program that is not there.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--command {command}: {str(error).lower()}; quote it for a shell") from None
    if not words:
        raise ValueError("--command is empty: give the assistant's command line")
    program = shutil.which(words[0])
    if program is None:
        raise ValueError(f"--command: no program {words[0]!r}; install it, or give its full path")
    return [os.path.abspath(program), *words[1:]]


def choice_prompt(skills: Sequence[Skill], request: str) -> str:
    listed = "\n".join(f"- {s.name}: {' '.join(s.description.split())}" for s in skills)
    return (
        f"These skills are at hand:\n\n{listed}\n\nA user asks:\n\n{request}\n\n"
        f"Which one skill do you open first? Answer with its name only, or with {NONE} when none of them fits. "
        "Do not carry out the request."
    )


def chosen(said: str, names: Sequence[str]) -> str:
    """The last skill name, or `none`, in what an assistant said; empty when there is none."""
    words = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", said.lower())
    return next((word for word in reversed(words) if word in names or word == NONE), "")


def task_prompt(skill: Skill, task: Task) -> str:
    return (
        f"{task.request.strip()}\n\nWork in the current folder; nobody can answer questions. "
        f"Your skill (read this file first): {FOLDERS['claude'] / skill.name}/SKILL.md"
    )


def prepare_folder(folder: Path, task: Task) -> None:
    """A fresh folder with the files that the task begins with."""
    folder.mkdir(parents=True)
    for name, text in task.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def decide(task: Task, skill: Skill, folder: Path) -> tuple[bool, str]:
    """(did the task succeed, what its check said)."""
    said, status = run_bounded(["bash", "-c", task.check], folder, None, CHECK_LIMIT_S, evals=skill.folder / "evals")
    if status is None:
        said += f"\nthe check was stopped after {CHECK_LIMIT_S:g} s, or printed too much"
    return status == 0, said


def run_bounded(
    argv: Sequence[str],
    folder: Path,
    text: str | None,
    limit_s: float,
    keep: Path | None = None,
    evals: Path | None = None,
) -> tuple[str, int | None]:
    """Run a program in `folder`: (what it printed, exit status); None for one that had to be killed, with its children:
    at its limit, or for printing more than `MOST_OUTPUT`.

    Args:
        text: its standard input.
        keep: where stdout.txt and stderr.txt are written.
        evals: becomes $EVALS.
    """
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if evals is not None:
        variables["EVALS"] = str(evals.resolve())
    with tempfile.TemporaryDirectory() as spare:
        # Files, not pipes: a server that the program leaves behind would hold a pipe open.
        kept = keep or Path(spare)
        heard = Path(spare) / "stdin"
        heard.write_text(text or "", encoding="utf-8")
        with heard.open() as stdin, (kept / "stdout.txt").open("w") as out, (kept / "stderr.txt").open("w") as err:
            try:
                process = subprocess.Popen(
                    argv, cwd=folder, env=variables, stdin=stdin, stdout=out, stderr=err, start_new_session=True
                )
            except OSError as error:
                return f"{argv[0]}: {error.strerror or error}", 127
            try:
                status = _wait(process, limit_s, [kept / "stdout.txt", kept / "stderr.txt"])
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said, complained = (_end_of(kept / name) for name in ("stdout.txt", "stderr.txt"))
    return (said if keep is not None else said + complained), status


def _wait(process: subprocess.Popen[bytes], limit_s: float, printed: Sequence[Path]) -> int | None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and all(file.stat().st_size <= MOST_OUTPUT for file in printed):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(0.2, limit_s))
    return None


def _end_of(file: Path) -> str:
    """What was printed, or its end; the file is cut to what may be kept."""
    if file.stat().st_size > MOST_OUTPUT:
        os.truncate(file, MOST_OUTPUT)
    return file.read_text(encoding="utf-8", errors="replace")


def _ended(status: int | None) -> str:
    return "stopped at its limit of time or output" if status is None else f"ended with status {status}"


# ---- the table -------------------------------------------------------------------------------------------------------


def table(results: dict[str, list[Case]]) -> str:
    """Markdown: a line a skill, then what failed."""
    kinds: tuple[Kind, ...] = ("trigger", "near miss", "task")
    lines = ["| skill | triggers | near misses | tasks |", "|---|---|---|---|"]
    for name, cases in results.items():
        counts = [[c.passed for c in cases if c.kind == kind] for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(f"{sum(c)}/{len(c)}" if c else "–" for c in counts) + " |")
    failed = [(name, case) for name, cases in results.items() for case in cases if not case.passed]
    if failed:
        lines += ["", "| failed | expected | got | request |", "|---|---|---|---|"]
        for name, case in failed:
            got = f"{case.answer or 'no name'}{f' ({case.remark})' if case.remark else ''}"
            cells = (f"{name} {case.name}", case.expected, got, case.request)
            lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "/")[:200] for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write_table(results: dict[str, list[Case]], command: str, out: Path) -> None:
    """table.md and results.json."""
    (out / "table.md").write_text(table(results), encoding="utf-8")
    data = {"command": command, "skills": {name: [asdict(c) for c in cases] for name, cases in results.items()}}
    (out / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
