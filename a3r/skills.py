"""Skills: folders with a SKILL.md that tell a coding assistant how a job is done here (the Agent Skills format).

    <name>/SKILL.md       front matter (name, description, …) and the instructions
    <name>/references/    details, one level deep        <name>/scripts/   helpers that run
    <name>/assets/        files to copy                  <name>/evals/     requests and tasks that test the skill

`read_skill` refuses a folder that an assistant could not load, and says what to change; what makes a readable skill a
good one is `skill_checks`. The skills that ship are in `skills/` of a checkout and in `a3r/_skills` of an installation.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from a3r.strictyaml import Document, FormatError, Problem, load_strict

SKILL_FILE = "SKILL.md"
KEYS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
"""What the front matter may hold; the first two are required."""
PARTS = ("references", "scripts", "assets", "evals")
"""Folders that a skill may have."""
MAX_NAME, MAX_DESCRIPTION, MAX_COMPATIBILITY = 64, 1024, 500
MAX_FILE_BYTES = 200_000

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Skill:
    """A skill that an assistant can load."""

    name: str
    description: str
    folder: Path
    body: str
    """The instructions, below the front matter."""
    body_line: int
    """Line of SKILL.md on which the body begins."""
    front_matter: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / SKILL_FILE

    def files(self, *, evals: bool = True) -> list[Path]:
        """All files, relative to the folder, sorted; byte code that a run left behind is not the skill's."""
        found = (Path(root, name).relative_to(self.folder) for root, _, names in os.walk(self.folder) for name in names)
        return sorted(
            f
            for f in found
            if "__pycache__" not in f.parts and not f.name.startswith(".") and (evals or f.parts[0] != "evals")
        )


def home() -> Path:
    """The folder of the skills that ship with this installation.

    Raises:
        FileNotFoundError: neither in the package nor beside it.
    """
    package = Path(__file__).parent
    for folder in (package / "_skills", package.parent / "skills"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no skills in {package / '_skills'}: the installation is damaged; install a3r again")


def skill_folders(where: Path) -> list[Path]:
    """`where` itself when it is a skill, or was meant to be one; else the folders in it. Hidden ones are no skills."""
    if not where.is_dir() or any(p.name.lower() == SKILL_FILE.lower() for p in where.iterdir()):
        return [where]
    return sorted(p for p in where.iterdir() if p.is_dir() and not p.name.startswith((".", "_")))


def shipped() -> list[Skill]:
    """The skills of this installation, by name."""
    return [read_skill(folder) for folder in skill_folders(home())]


def read_skill(folder: Path) -> Skill:
    """Read a skill.

    Raises:
        FormatError: every reason why it cannot be loaded, each with what to change.
    """
    text, body_line, document = _open(folder)
    problems = [*_front_matter_problems(document, Path(os.path.abspath(folder)).name), *_file_problems(folder)]
    if problems:
        raise FormatError(problems)
    data = document.data
    body = "\n".join(text.split("\n")[body_line - 1 :])
    return Skill(data["name"], data["description"].strip(), folder, body, body_line, data)


# ---- SKILL.md ----------------------------------------------------------------------------------------------------


def _open(folder: Path) -> tuple[str, int, Document]:
    """(text, line on which the body begins, front matter).

    Raises:
        FormatError: there is no such file, it is not text, or the front matter cannot be found or parsed.
    """
    path = folder / SKILL_FILE
    text = _text_of(path)
    lines = text.split("\n")
    if lines[0] != "---":
        raise _refuse(f"{path}:1", "the file does not begin with front matter", "make `---` its first line")
    if "---" not in lines[1:]:
        raise _refuse(f"{path}:1", "the front matter has no end", "put a line `---` below its last key")
    end = lines.index("---", 1)
    for number, line in enumerate(lines[1:end], 2):
        if "\t" in line:
            raise _refuse(f"{path}:{number}", "a tab in the front matter", "indent with spaces")
    document = load_strict("\n".join(lines[1:end]), str(path), first_line=2)
    if not isinstance(document.data, dict):
        raise _refuse(f"{path}:2", "the front matter holds no keys", "write `name: …` and `description: …` lines")
    return text, end + 2, document


def _text_of(path: Path) -> str:
    """Raises:
    FormatError: no such file, or not plain UTF-8 text with Unix line ends.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        wrong = [p.name for p in path.parent.glob("*") if p.name.lower() == SKILL_FILE.lower()]
        fix = f"rename {wrong[0]} to {SKILL_FILE}" if wrong else f"a skill is a folder with a {SKILL_FILE}"
        raise _refuse(str(path), "there is no such file", fix) from None
    except OSError as error:
        fix = "remove the link that leads back to itself" if error.errno == errno.ELOOP else "make it a readable file"
        raise _refuse(str(path), f"cannot be read: {error.strerror}", fix) from None
    if raw.startswith(b"\xef\xbb\xbf"):
        raise _refuse(f"{path}:1", "a byte order mark stands before the front matter", "save it as UTF-8 without BOM")
    if b"\0" in raw:
        raise _refuse(str(path), "holds zero bytes, so it is no text", "save it as UTF-8 text")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _refuse(f"{path}:{line}", "is not UTF-8", "save it as UTF-8 text") from None
    if "\r" in text:
        line = text[: text.index("\r")].count("\n") + 1
        raise _refuse(f"{path}:{line}", "has Windows line ends (CRLF)", "save it with Unix line ends (LF)")
    return text


def _front_matter_problems(document: Document, folder_name: str) -> Iterator[Problem]:
    data = document.data
    for key in data:
        if key not in KEYS:
            yield Problem(document.where((key,)), "unknown key", f"known: {', '.join(KEYS)}", key=key)
    yield from _name_problems(document, folder_name)
    yield from _text_problems(document, "description", MAX_DESCRIPTION, required=True)
    yield from _text_problems(document, "license", MAX_COMPATIBILITY)
    yield from _text_problems(document, "compatibility", MAX_COMPATIBILITY)
    metadata = data.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fix = 'write `key: "value"` lines below it'
        yield Problem(document.where(("metadata",)), "must be a map of text to text", fix, key="metadata")
    tools = data.get("allowed-tools", "")
    if not isinstance(tools, str) and not (isinstance(tools, list) and all(isinstance(t, str) for t in tools)):
        fix = "write the tools on one line, separated by spaces"
        yield Problem(document.where(("allowed-tools",)), "must be text", fix, key="allowed-tools")


def _name_problems(document: Document, folder_name: str) -> Iterator[Problem]:
    where, name = document.where(("name",)), document.data.get("name")
    if name is None:
        yield Problem(where, "is missing", f"add `name: {folder_name}`", key="name")
    elif not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        yield Problem(
            where,
            f"{name!r} is no skill name",
            f"take at most {MAX_NAME} of a-z, 0-9 and single hyphens, none at the ends, and name the folder so too",
            key="name",
        )
    elif name != folder_name:
        yield Problem(where, f"{name!r} is not the folder's name", f"write {folder_name!r}, or rename it", key="name")


def _text_problems(document: Document, key: str, limit: int, *, required: bool = False) -> Iterator[Problem]:
    where, value = document.where((key,)), document.data.get(key)
    if value is None and key not in document.data:
        if required:
            yield Problem(where, "is missing", "say what the skill does and when to use it", key=key)
    elif not isinstance(value, str) or not value.strip():
        yield Problem(where, f"must be text, not {value!r}", "write it in words, in quotes if it has `: `", key=key)
    elif len(value) > limit:
        yield Problem(where, f"has {len(value)} characters", f"at most {limit}: cut it", key=key)


# ---- the folder --------------------------------------------------------------------------------------------------


def _file_problems(folder: Path) -> Iterator[Problem]:
    """What may not be in a skill's folder: links, binary and huge files, folders that no assistant opens."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and entry.name not in (*PARTS, "__pycache__"):
            yield Problem(str(entry), "is no part of a skill", f"move what it holds to one of: {', '.join(PARTS)}")
    for root, folders, names in os.walk(folder):
        for name in sorted(folders + names):
            path = Path(root, name)
            if path.is_symlink():
                yield Problem(str(path), "is a link, which would not survive a copy", "put the file itself there")
            elif path.is_file() and path.suffix != ".pyc":
                yield from _content_problems(path, folder)


def _content_problems(path: Path, folder: Path) -> Iterator[Problem]:
    if path.stat().st_size > MAX_FILE_BYTES:
        yield Problem(str(path), f"has more than {MAX_FILE_BYTES // 1000} kB", "shorten it, or say where to get it")
    elif path.relative_to(folder).parts[0] != "assets" and b"\0" in path.read_bytes():
        yield Problem(str(path), "is a binary file", "only assets/ may hold such; everything else is text")


def _refuse(where: str, problem: str, fix: str) -> FormatError:
    return FormatError([Problem(where, problem, fix)])
