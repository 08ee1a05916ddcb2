"""YAML read strictly: what a person sees is what the program gets, and every problem has a line and a fix.

Differences from PyYAML's defaults, each because the default silently changes experiments: a key given twice is refused;
 `1e-7` and `5e6` are numbers; plain `yes`, `no`, `on`, `off` (booleans there), `12:30` (750 there), `010`
(8 there) and `1_000` are refused with the way to write them; dates stay text; no tags, no anchors that merge.
Numbers that are not finite are refused. Knows nothing of goals or blueprints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a file."""

    where: str
    """`file` or `file:line`."""
    problem: str
    fix: str = ""
    key: str = ""
    """Dotted path of the key concerned; empty for the file as a whole."""

    def __str__(self) -> str:
        key = f" {self.key}:" if self.key else ""
        return f"{self.where}:{key} {self.problem}" + (f"; {self.fix}" if self.fix else "")


class FormatError(ValueError):
    """A file that cannot be used; `problems` says line, problem and fix of each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


@dataclass(frozen=True)
class Document:
    """Parsed data with the line of every key."""

    name: str
    data: Any
    lines: Mapping[Path, int] = field(default_factory=dict)

    def where(self, path: Path = ()) -> str:
        """`file:line` of a key, or of its nearest parent that is in the file."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
TRAPS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"(yes|no|on|off)$", re.I), "is a boolean to some YAML readers", "write true or false, or quote"),
    (re.compile(r"(TRUE|FALSE|True|False|NULL|Null)$"), "is spelled in lower case", "write it so, or quote it"),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?$"), "is a number in base 60 to some YAML readers",
     "quote it, or write a duration such as 12m30s"),
    (re.compile(r"[-+]?0[0-9]+$"), "has a leading zero (octal to some YAML readers)", "drop the zero, or quote it"),
    (re.compile(r"[-+]?0[xob][0-9a-fA-F_]+$"), "is not a decimal number", "write it in decimal, or quote it"),
    (re.compile(r"[-+]?[0-9][0-9_]*_[0-9_.]*$"), "has an underscore in a number", "write the digits only, or quote it"),
    (re.compile(r"[-+]?\.(inf|nan)$", re.I), "is not a finite number", "give a finite number"),
)  # fmt: skip


def load_strict(text: str, name: str = "<text>", first_line: int = 1) -> Document:
    """Parse one YAML document.

    Args:
        name: what messages call the text, usually its path.
        first_line: the line number of the text's first line (front matter starts further down a file).

    Raises:
        FormatError: not YAML, a duplicate key, a trap from the list above, a tag or a merge key.
    """
    reader = _Reader(name, first_line)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = first_line + (mark.line if mark else 0)
        raise FormatError(
            [Problem(f"{name}:{line}", f"not valid YAML: {error.problem}", "check indentation, quotes and brackets")]
        ) from None
    except yaml.YAMLError as error:
        raise FormatError([Problem(name, f"not valid YAML: {error}", "save it as UTF-8 text")]) from None
    data = reader.value(node, ()) if node is not None else None
    if reader.problems:
        raise FormatError(reader.problems)
    return Document(name, data, reader.lines)


_CORE = frozenset({"str", "int", "float", "bool", "null", "timestamp", "value", "merge"})
"""What an untagged scalar resolves to."""


class _Reader:
    def __init__(self, name: str, first_line: int) -> None:
        self.name = name
        self.first_line = first_line
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self.depth: set[int] = set()

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, self._line(node))
        if id(node) in self.depth:
            return self._refuse(node, path, "an alias refers to its own parent", "write the value out")
        self.depth.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self.depth.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, path, "a key must be a word", "write `key: value`")
                continue
            key = str(key_node.value)
            if key == "<<":
                self._refuse(key_node, path, "merge keys (<<) are not read", "write the keys out")
                continue
            if key in out:
                first = self.lines[(*path, key)]
                self._refuse(key_node, (*path, key), f"given twice (first on line {first})", "keep one of them")
                continue
            self.lines[(*path, key)] = self._line(key_node)
            out[key] = self.value(value_node, (*path, key))
        return out

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        text = str(node.value)
        if node.tag and node.tag.removeprefix("tag:yaml.org,2002:") not in _CORE:
            return self._refuse(node, path, f"the tag {node.tag} is not read", "write a plain value")
        if getattr(node, "style", None) is not None:
            return text
        if text in {"", "~", "null"}:
            return None
        if text in {"true", "false"}:
            return text == "true"
        for pattern, what, fix in TRAPS:
            if pattern.match(text):
                return self._refuse(node, path, f"{text!r} {what}", fix)
        if _INT.match(text):
            return int(text)
        if FLOAT.match(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                return self._refuse(node, path, f"{text} is not a finite number", "give a finite number")
            return number
        return text

    def _refuse(self, node: yaml.Node, path: Path, problem: str, fix: str) -> None:
        where = f"{self.name}:{self._line(node)}"
        self.problems.append(Problem(where, problem, fix, key=dotted(path)))

    def _line(self, node: yaml.Node) -> int:
        return self.first_line + node.start_mark.line


def dotted(path: Iterable[str | int]) -> str:
    """`("levels", 2)` → `levels[2]`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else (f".{part}" if out else part)
    return out
