"""Does every number of a text stand in a study's report, rounded as it may be?

    python check_numbers.py summary.md runs/study

Numbers of the report are those of report.json, the goal's lock and the verdict's sentence. Small whole numbers up to 12
pass: they count things. Exit status: 0 all found; 1 some not, each with its line; 2 nothing to read.
Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE]-?\d+)?(?![\w])")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    text, study = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        known = known_numbers(study)
        lines = text.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        print(f"cannot read: {error}", file=sys.stderr)
        return 2
    strange = [
        f"{text}:{at}: {word} stands nowhere in the report"
        for at, line in enumerate(lines, 1)
        for word in NUMBER.findall(line)
        if not stands(word, known)
    ]
    print("\n".join(strange) or f"good: every number of {text} stands in the report")
    return int(bool(strange))


def known_numbers(study: Path) -> set[float]:
    report = json.loads((study / "report" / "report.json").read_text(encoding="utf-8"))
    found = set(values(report))
    for name in ("goal.lock.yaml", "report/report.md"):
        found |= {float(word) for word in NUMBER.findall((study / name).read_text(encoding="utf-8"))}
    return found


def values(node: object) -> Iterator[float]:
    if isinstance(node, bool):
        return
    if isinstance(node, int | float):
        yield float(node)
    elif isinstance(node, str):
        yield from (float(word) for word in NUMBER.findall(node))
    elif isinstance(node, dict):
        for value in node.values():
            yield from values(value)
    elif isinstance(node, list):
        for value in node:
            yield from values(value)


def stands(word: str, known: set[float]) -> bool:
    """Is it a count, or a number of the report rounded to the digits written?"""
    value = float(word)
    if value.is_integer() and 0 <= value <= 12 and "." not in word:
        return True
    digits = len(word.partition(".")[2]) if "e" not in word.lower() else 12
    step = 0.5 * 10**-digits
    return any(abs(value - k) <= step * 1.000001 or abs(value - 100 * k) <= step * 1.000001 for k in known)


if __name__ == "__main__":
    sys.exit(main())
