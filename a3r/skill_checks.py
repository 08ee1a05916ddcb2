"""What makes a readable skill a good one: short, ends in a checker, quotes what exists, says what no other skill says.

Code blocks say what they claim, in the info string of their fence:

    ```bash run             runs, in a fresh folder, after the blocks above it; ends with status 0
    ```bash run exit=2      runs, and ends with that status
    ```python run           the same for Python
    ```yaml file=goal.md    is written to that file of the folder
    ```bash example         is not run: it needs a GPU, hours, or a person

Shell and Python blocks must say one of these; blocks of other languages without a mark are illustrations. Nothing of a
skill is executed here: commands are looked up in the command lines of `a3r` and `swarmtune`.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from a3r.skills import Skill, read_skill, skill_folders
from a3r.strictyaml import FormatError, Problem

MAX_BODY_LINES = 300
MAX_SIMILARITY = 0.4
"""Cosine of two descriptions' words."""
MAX_SHARED = 0.08
"""Share of a body's 8-word runs that another body has too."""
MAX_LISTING = 5000
"""Characters of all names and descriptions together: assistants have one budget for those of all skills, and leave
descriptions out beyond it."""
CHECKER = "Checker"
"""Heading of the last section."""
USE, NOT = "Use when", "Do not use when"


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    marks: tuple[str, ...]
    """Words behind the language."""
    text: str
    line: int
    """Of the fence, in the file."""

    @property
    def runs(self) -> bool:
        return "run" in self.marks

    @property
    def file(self) -> str | None:
        """Where the block is written; None when it is not."""
        return self._value("file")

    @property
    def status(self) -> int:
        """Exit status that a running block ends with."""
        return int(self._value("exit") or 0)

    def _value(self, key: str) -> str | None:
        return next((m.removeprefix(f"{key}=") for m in self.marks if m.startswith(f"{key}=")), None)


def check(where: Sequence[Path]) -> tuple[list[Skill], list[Problem]]:
    """Check skills, or folders of skills, by themselves and against each other."""
    skills: list[Skill] = []
    problems: list[Problem] = []
    for folder in (f for place in where for f in skill_folders(place)):
        try:
            skills.append(read_skill(folder))
        except FormatError as error:
            problems += error.problems
    if not skills and not problems:
        problems.append(Problem(", ".join(map(str, where)), "holds no skill", "give a skill or a folder of skills"))
    known = {skill.name for skill in skills}
    for skill in skills:
        problems += check_skill(skill, known)
    return skills, problems + list(_overlaps(skills)) + list(_listing_problems(skills, where))


def check_skill(skill: Skill, known: Iterable[str] = ()) -> list[Problem]:
    """Everything that can be said of one skill; `known` are the names that its evals may point to."""
    from a3r.skill_evals import load_evals

    problems = [
        *_description_problems(skill),
        *_body_problems(skill),
        *_link_problems(skill),
        *_private_paths(skill),
        *_block_problems(skill),
        *_quoted_problems(skill),
    ]
    if (skill.folder / "evals").is_dir():
        try:
            load_evals(skill, known)
        except FormatError as error:
            problems += error.problems
    return problems


# ---- description and body --------------------------------------------------------------------------------------------


def _description_problems(skill: Skill) -> Iterator[Problem]:
    for phrase in (USE, NOT):
        if phrase not in skill.description:
            fix = f"write `{phrase} …`, so that an assistant can tell it from its neighbours"
            yield Problem(str(skill.file), f"does not say {phrase!r}", fix, key="description")


def _body_problems(skill: Skill) -> Iterator[Problem]:
    lines = skill.body.rstrip("\n").split("\n")
    if len(lines) >= MAX_BODY_LINES:
        fix = f"keep it under {MAX_BODY_LINES}: move details to references/"
        yield Problem(str(skill.file), f"the body has {len(lines)} lines", fix)
    headings = [line for line in _prose(skill.body).split("\n") if line.startswith("## ")]
    if not headings or headings[-1] != f"## {CHECKER}":
        fix = f"end with a section `## {CHECKER}`: the command whose output decides"
        yield Problem(str(skill.file), "does not end in a checker", fix)
    else:
        start = skill.body.rindex(f"## {CHECKER}")
        if not any(b.language == "bash" for b in _closed_blocks(skill.body[start:])):
            yield Problem(str(skill.file), f"{CHECKER} has no command", "put the command in a ```bash block")


def blocks(text: str, first_line: int = 1) -> list[Block]:
    """The fenced blocks of a Markdown text."""
    found: list[Block] = []
    opened: tuple[str, list[str], int] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.split("\n"), first_line):
        fence = re.match(r"(`{3,}|~{3,})\s*(.*)$", line)
        if opened is None and fence:
            opened, inside = (fence[1], fence[2].split(), number), []
        elif opened is not None and fence and fence[1].startswith(opened[0]) and not fence[2]:
            _, info, start = opened
            found.append(Block(info[0] if info else "", tuple(info[1:]), "\n".join(inside) + "\n", start))
            opened = None
        elif opened is not None:
            inside.append(line)
    if opened is not None:
        raise FormatError([Problem(f"line {opened[2]}", "a code block is never closed", "close its fence")])
    return found


def _closed_blocks(text: str, first_line: int = 1) -> list[Block]:
    """The same, or none of a text with an open block, which is told elsewhere."""
    try:
        return blocks(text, first_line)
    except FormatError:
        return []


def _prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1`*~*\s*$", "", text, flags=re.DOTALL | re.MULTILINE)


def texts(skill: Skill) -> list[tuple[Path, str, int]]:
    """(file, text, its first line) of everything that an assistant reads: the body and the references."""
    found = [(skill.file, skill.body, skill.body_line)]
    for path in sorted((skill.folder / "references").glob("*.md")):
        found.append((path, path.read_text(encoding="utf-8"), 1))
    return found


def _block_problems(skill: Skill) -> Iterator[Problem]:
    for path, text, first in texts(skill):
        try:
            found = blocks(text, first)
        except FormatError as error:
            yield Problem(str(path), error.problems[0].problem, f"{error.problems[0].where}: close its fence")
            continue
        for block in found:
            where = f"{path}:{block.line}"
            unknown = [m for m in block.marks if not re.fullmatch(r"run|example|file=\S+|exit=\d+", m)]
            if unknown:
                yield Problem(where, f"{unknown[0]!r} says nothing here", "write run, exit=N, file=NAME or example")
            elif block.language in {"bash", "sh", "python", "console"} and not block.marks:
                yield Problem(
                    where, "does not say whether it runs", "write run, file=NAME or example behind the language"
                )
            elif block.runs and block.language not in {"bash", "python"}:
                yield Problem(where, f"{block.language!r} cannot be run", "only bash and python blocks run")
            elif block.file and (Path(block.file).is_absolute() or ".." in Path(block.file).parts):
                yield Problem(where, f"{block.file} is outside the folder", "name a file below the working folder")


# ---- links and paths -------------------------------------------------------------------------------------------------

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PRIVATE = re.compile(r"(?<![\w.~/{}-])(/(?:root|home|Users|work|mnt|opt|srv|data|private)/[\w.-]+|[A-Z]:\\\\?\w+)")


def _link_problems(skill: Skill) -> Iterator[Problem]:
    for path, text, first in texts(skill):
        for number, line in enumerate(text.split("\n"), first):
            for target in _LINK.findall(line):
                yield from _target_problems(skill, path, f"{path}:{number}", target)
    said = "\n".join(text for _, text, _ in texts(skill))
    for file in skill.files(evals=False):
        if file.parts[0] in {"references", "scripts", "assets"} and file.as_posix() not in said:
            fix = "say in SKILL.md when to use it, by its path, or remove it"
            yield Problem(str(skill.folder / file), "is never mentioned", fix)
        if file.parts[0] == "references" and len(file.parts) > 2:
            yield Problem(str(skill.folder / file), "lies too deep", "references/ is one level deep: move it up")


def _target_problems(skill: Skill, path: Path, where: str, target: str) -> Iterator[Problem]:
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
        return
    file = (path.parent / target.split("#")[0]).resolve()
    if not file.is_relative_to(skill.folder.resolve()):
        yield Problem(
            where, f"{target} leads out of the skill", "an installed skill stands alone: name the thing instead"
        )
    elif not file.exists():
        yield Problem(where, f"{target} does not exist", "correct the path, relative to the file that has the link")
    elif path != skill.file and file.suffix == ".md":
        yield Problem(
            where, f"{target} is a link from a reference", "link it from SKILL.md: references are one level deep"
        )


def _private_paths(skill: Skill) -> Iterator[Problem]:
    for file in skill.files():
        path = skill.folder / file
        if file.suffix not in {".md", ".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".txt", ""}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if hit := _PRIVATE.search(line):
                fix = "take a relative path, or a placeholder such as DIR"
                yield Problem(f"{path}:{number}", f"{hit[0]} is a path of one machine", fix)


# ---- what is quoted --------------------------------------------------------------------------------------------------

_COMMAND = re.compile(r"(?:^|[\s;&|($])(a3r|swarmtune)[ \t]+((?:[^\n;|&)#<>\\]|\\\n)+)")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*$")
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


def _quoted_problems(skill: Skill) -> Iterator[Problem]:
    for path, text, first in texts(skill):
        for line, quoted in _quotations(text, first):
            for problem, fix in [*_command_problems(quoted), *_key_problems(quoted)]:
                yield Problem(f"{path}:{line}", problem, fix)


def _quotations(text: str, first: int) -> Iterator[tuple[int, str]]:
    """(line, text) of each shell block and each piece of inline code."""
    for block in _closed_blocks(text, first):
        if block.language in {"bash", "sh", "console", "yaml", ""}:
            yield block.line, block.text
    prose = _prose(text)
    for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", prose):
        at = text.find(match[0])
        yield first + text[:at].count("\n"), match[1]


def _command_problems(quoted: str) -> Iterator[tuple[str, str]]:
    for program, rest in _COMMAND.findall(quoted):
        words = _words(rest)
        command, said = _command_line(program), program
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            word = words.pop(0)
            if word not in command.commands:
                if re.fullmatch(r"[a-z][a-z-]*", word):
                    near = difflib.get_close_matches(word, command.commands, 1) or sorted(command.commands)
                    yield f"`{said}` has no command {word!r}", f"known: {', '.join(near)}"
                break
            command, said = command.commands[word], f"{said} {word}"
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for word in (w.split("=")[0] for w in words):
            if _OPTION.match(word) and word not in options:
                near = difflib.get_close_matches(word, options, 1) or sorted(o for o in options if o.startswith("--"))
                yield f"`{said}` has no option {word}", f"`{said} --help` knows: {', '.join(near)}"


def _words(rest: str) -> list[str]:
    try:
        return shlex.split(rest.replace("\\\n", " "))
    except ValueError:
        return rest.split()


@cache
def _command_line(program: str) -> Any:
    from typer.main import get_command

    if program == "swarmtune":
        from swarmtune.cli import app

        return get_command(app)
    from a3r.cli import whole

    return get_command(whole())


def _key_problems(quoted: str) -> Iterator[tuple[str, str]]:
    """Dotted configuration keys: alone in inline code, or behind --set."""
    keys, sections = _config_keys()
    said = [quoted] if _KEY.fullmatch(quoted) else re.findall(r"--set\s+['\"]?([a-z_]+(?:\.[a-z_]+)+)=", quoted)
    for key in said:
        is_file = key.rsplit(".", 1)[-1] in _SUFFIXES
        if key.split(".")[0] in sections and key not in keys and not is_file:
            near = difflib.get_close_matches(key, keys, 1) or [
                k for k in sorted(keys) if k.startswith(key.split(".")[0])
            ]
            yield f"{key} is no configuration key", f"known: {', '.join(near)}"


_SUFFIXES = frozenset({"log", "json", "jsonl", "md", "yaml", "py"})


@cache
def _config_keys() -> tuple[frozenset[str], frozenset[str]]:
    """(all dotted keys and their sections, first words of the dotted ones)."""
    from swarmtune.config import known_keys
    from swarmtune.script import ScriptConfig

    keys = known_keys(ScriptConfig)
    inner = {key.rsplit(".", n)[0] for key in keys for n in range(1, key.count(".") + 1)}
    return frozenset(keys) | inner, frozenset(key.split(".")[0] for key in keys if "." in key)


# ---- between skills --------------------------------------------------------------------------------------------------

_STOP = frozenset(
    "a an and are as at be by do does for from has how in into is it its no not of on one or so some such than that "
    "the their them then this to use used uses user wants when where which while who whose with without asked asks "
    "you your a3r swarmtune".split()
)


def _overlaps(skills: Sequence[Skill]) -> Iterator[Problem]:
    for one, other in combinations(skills, 2):
        alike = similarity(one.description, other.description)
        if alike > MAX_SIMILARITY:
            fix = "say in each what the other is not for, or make them one skill"
            yield Problem(str(one.file), f"reads like {other.name} ({alike:.2f} of 1)", fix, key="description")
        if one.name == other.name:
            yield Problem(str(one.file), f"{other.folder} has the same name", "rename one of them", key="name")
        shared = shared_prose(one.body, other.body)
        if shared > MAX_SHARED:
            fix = "keep it in one of them and name that skill in the other"
            yield Problem(str(one.file), f"{shared:.0%} of it stands in {other.name} too", fix)


def _listing_problems(skills: Sequence[Skill], where: Sequence[Path]) -> Iterator[Problem]:
    length = sum(len(skill.name) + len(skill.description) for skill in skills)
    if length > MAX_LISTING:
        longest = max(skills, key=lambda skill: len(skill.description))
        fix = f"at most {MAX_LISTING}, or assistants leave descriptions out: shorten the longest, {longest.name}"
        yield Problem(", ".join(map(str, where)), f"names and descriptions have {length} characters", fix)


def similarity(one: str, other: str) -> float:
    """Cosine of the words of two descriptions, without what they are not for; from 0 to 1."""
    a, b = (Counter(_content_words(text.split(NOT)[0])) for text in (one, other))
    norm = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(a[w] * b[w] for w in a) / norm if norm else 0.0


def _content_words(text: str) -> list[str]:
    return [w for w in re.findall(r"[a-z][a-z0-9-]+", text.lower()) if w not in _STOP]


def shared_prose(one: str, other: str) -> float:
    """Share of the shorter text's 8-word runs that stand in the other one; code blocks do not count."""
    a, b = (_runs(_prose(text)) for text in (one, other))
    return len(a & b) / max(1, min(len(a), len(b)))


def _runs(text: str, length: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}
