"""The documented phrases of a goal's prose, read without a model.

`read_prose` gives what the phrases say, what they were taken to mean (assumptions), and which lines said nothing it
knows. It never fills a gap: what is missing becomes a question in `a3r.compile`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_NAME = r"`?([A-Za-z][A-Za-z0-9_.]*)`?"
_NUM = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"

_THRESHOLD = re.compile(rf"\b(minimum|smallest|lowest|maximum|largest|highest)\s+{_NAME}\s+that\s+still\b", re.I)
_BEST = re.compile(rf"\b(?:find|which(?: value of)?|determine)\s+(?:the\s+)?best\s+{_NAME}", re.I)
_BEST_FOR = re.compile(rf"\bwhich\s+{_NAME}\s+is\s+best\b", re.I)
_COMPARE = re.compile(rf"\bcompare\s+{_NAME}\s+(\S+?)\s+(?:and|with|against|to)\s+([^\s,;]+)", re.I)
_INFLUENCE = re.compile(rf"\b(?:whether|does)\s+{_NAME}\s+(?:influences?|affects?|changes?)\s+(.+?)(?:[.?;\n]|$)", re.I)
_THAT_VALUE = re.compile(r"^(?:that|this|the)\s+(?:value|minimum|maximum|threshold|answer)\b|^it\b", re.I)
_RANGE = re.compile(rf"{_NAME}\s*(?:from|between|in the range(?: of)?)\s+{_NUM}\s*(?:to|and|-|–)\s*{_NUM}", re.I)
_LIST = re.compile(rf"{_NAME}\s+(?:in|of|among|out of)\s*[\[{{(]\s*([^\]}})]+)[\]}})]", re.I)
_GPUS = re.compile(r"\b(\d+)\s+GPUs?\s+per\s+(?:experiment|run)\b", re.I)
_MODEL = re.compile(r"^model\s*:\s*`?([^\s`]+?)`?\.?$", re.I)
_EQUALS = re.compile(rf"\b([A-Za-z][A-Za-z0-9_.]*)\s*=\s*{_NUM}(?![\w.]*\w)")
_MAX_OF = re.compile(rf"^(?:max(?:imum)?\s+)?([a-z][a-z0-9]*(?:[_.][a-z0-9_.]+)+)\s*:\s*{_NUM}\.?$", re.I)
_AT_LEAST = re.compile(rf"\b([a-z][\w./@-]*/[\w./@-]+|reward)\s+(?:of\s+)?at\s+(least|most)\s+{_NUM}", re.I)
_RATIO = re.compile(rf"at\s+least\s+{_NUM}\s*%\s+of\s+(?:the\s+)?([a-z][\w/@-]*/[\w/@-]+)\s+(?:at|of)\s+{_NUM}", re.I)
_NOT_WORSE = re.compile(
    rf"\b([a-z][\w/@-]*/[\w/@-]+)\s+not\s+worse\s+by\s+more\s+than\s+{_NUM}\s+than\s+(?:at\s+|that of\s+)?{_NUM}", re.I
)
_LAST = re.compile(r"\b(?:over|of|in)\s+the\s+last\s+(\d+)\s+steps?\b", re.I)
_METRIC = re.compile(r"\b(?:in|by|highest|lowest)\s+([a-z]\w*/[\w./@-]*\w)", re.I)
_RUNS = re.compile(r"\b(?:at most|no more than|up to)\s+(\d+)\s+runs\b", re.I)
_WALL = re.compile(
    r"\b(?:within|budget of|budget:|at most|in)\s+(\d+(?:\.\d+)?)\s*(minutes?|min|hours?|h|days?)\b", re.I
)
_SEEDS = re.compile(r"\bseed(?:s)?\s+(?:from|base)\s+(\d+)\b", re.I)

CONTEXT = ("base code", "reference tutorial", "create new", "python interpreter", "see ")
"""Beginnings of lines that are for whoever writes the client, not for the study."""


@dataclass
class Reading:
    """What prose says."""

    draft: dict[str, Any] = field(default_factory=dict)
    """A partial goal, by the keys of front matter."""
    assumptions: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Constraint lines in which no phrase was found."""


def read_prose(text: str) -> Reading:
    """What the documented phrases in `text` say."""
    reading = Reading()
    flat = _unwrap(text)
    title = _title(flat)
    if title:
        reading.draft["title"] = title
    _read_question(flat, reading)
    _read_criterion(flat, reading)
    _read_constraints(flat, reading)
    return reading


def _unwrap(text: str) -> str:
    """One paragraph or bullet a line; headings and quote marks dropped; bold and backticks kept out of the way."""
    lines: list[str] = []
    joining = False
    for raw in text.replace("**", "").splitlines():
        line = raw.strip().lstrip(">").strip()
        bullet = re.match(r"^(?:[-*•∗–]|\d+[.)])\s+(.*)$", line)
        if not line or line.startswith("#"):
            joining = False
            continue
        if bullet:
            lines.append(bullet[1].strip())
        elif joining:
            lines[-1] += " " + line
        else:
            lines.append(line)
        joining = True
    return "\n".join(lines)


def _title(flat: str) -> str:
    for line in flat.splitlines():
        found = re.match(r"^(?:goal|question)\s*[.:]\s*(.+)$", line, re.I)
        if found:
            return _shorten(found[1].split(". ")[0].rstrip("."))
    first = flat.splitlines()[0] if flat else ""
    return _shorten(first.split(". ")[0].rstrip("."))


def _shorten(sentence: str) -> str:
    """At most 100 characters, cut between words."""
    if len(sentence) <= 100:
        return sentence
    return re.sub(r"[\s,;(]+\S*$", "", re.sub(r"\s*\([^)]*\)", "", sentence)[:100]) + " …"


def _read_question(flat: str, reading: Reading) -> None:
    question: dict[str, Any] = {}
    threshold, best = _THRESHOLD.search(flat), _BEST.search(flat) or _BEST_FOR.search(flat)
    compare = _COMPARE.search(flat)
    if threshold:
        small = threshold[1].lower() in {"minimum", "smallest", "lowest"}
        question = {"type": "min_that_still" if small else "max_that_still", "factor": _key(threshold[2])}
    elif compare:
        question = {
            "type": "compare", "factor": _key(compare[1]),
            "levels": [_value(compare[2].strip("`'\"")), _value(compare[3].rstrip(".").strip("`'\""))],
        }  # fmt: skip
    elif best:
        question = {"type": "best", "factor": _key(best[1])}
    influences = [(_key(m[1]), m[2].strip()) for m in _INFLUENCE.finditer(flat)]
    for name, what in influences:
        if question and (_THAT_VALUE.match(what) or name != question["factor"]):
            question.setdefault("moderators", []).append({"factor": name})
        elif not question:
            question = {"type": "effect", "factor": name}
            metric = re.match(r"`?([a-z]\w*/[\w./@-]*\w)`?", what, re.I)
            if metric:
                question["criterion"] = {"metric": metric[1]}
    if not question:
        return
    ranges = _ranges(flat, reading)
    if "levels" not in question and question["factor"] in ranges:
        question["levels"] = ranges[question["factor"]]
    for moderator in question.get("moderators", []):
        if moderator["factor"] in ranges:
            moderator["levels"] = ranges[moderator["factor"]]
    reading.draft["question"] = question


def _ranges(flat: str, reading: Reading) -> dict[str, list[int | float | str | bool]]:
    out: dict[str, list[Any]] = {}
    for found in _LIST.finditer(flat):
        out[_key(found[1])] = [_value(v.strip().strip("`'\"")) for v in re.split(r",|\band\b", found[2]) if v.strip()]
    for found in _RANGE.finditer(flat):
        name, low, high = _key(found[1]), _value(found[2]), _value(found[3])
        levels = _between(low, high)
        if levels is not None and name not in out:
            out[name] = levels
            shown = ", ".join(str(x) for x in levels)
            reading.assumptions.append(f"{name} from {low} to {high} is tested at {shown}")
    return out


def _between(low: Any, high: Any) -> list[int | float] | None:
    """Doubling between powers of two, decades between powers of ten; None where neither fits."""
    if not (isinstance(low, int | float) and isinstance(high, int | float)) or not 0 < low < high:
        return None
    for factor in (2, 10):
        levels, value = [low], low
        while value < high * 0.999 and len(levels) < 40:
            value = value * factor
            levels.append(value if isinstance(low, int) and isinstance(high, int) else float(f"{value:.6g}"))
        if abs(levels[-1] / high - 1) < 1e-6 and len(levels) >= 3:
            return levels
    return None


def _read_criterion(flat: str, reading: Reading) -> None:
    question = reading.draft.get("question")
    if question is None:
        return
    criterion: dict[str, Any] = dict(question.get("criterion", {}))
    if found := _NOT_WORSE.search(flat):
        criterion |= {
            "metric": found[1], "rule": {"not_worse_by": float(found[2])}, "reference": {"level": _value(found[3])}
        }  # fmt: skip
    elif found := _RATIO.search(flat):
        criterion |= {
            "metric": found[2], "rule": {"ratio_at_least": float(found[1]) / 100},
            "reference": {"level": _value(found[3])},
        }  # fmt: skip
    elif found := _AT_LEAST.search(flat):
        metric = "reward/mean" if found[1].lower() == "reward" else found[1]
        if metric != found[1]:
            reading.assumptions.append("reward means the metric reward/mean")
        criterion |= {"metric": metric, "rule": {f"at_{found[2].lower()}": float(found[3])}}
        if found[2].lower() == "most":
            criterion["better"] = "lower"
    elif question["type"] in {"best", "compare"} and (found := _METRIC.search(flat)):
        criterion["metric"] = found[1]
    if found := _LAST.search(flat):
        criterion["at"] = {"last_k": int(found[1])}
    if criterion:
        question["criterion"] = criterion


def _read_constraints(flat: str, reading: Reading) -> None:
    fixed: dict[str, Any] = {}
    budget: dict[str, Any] = {}
    asked = {reading.draft.get("question", {}).get("factor")}
    for line in flat.splitlines():
        if line.lower().startswith(CONTEXT):
            reading.assumptions.append(f"left to whoever writes the client: {line}")
            continue
        before = (len(fixed), len(budget), "gpus_per_run" in reading.draft)
        if found := _MODEL.match(line):
            fixed["model"] = found[1]
        if found := _MAX_OF.match(line):
            fixed[_key(found[1])] = _value(found[2])
        for name, value in _EQUALS.findall(line):
            if _key(name) not in asked:
                fixed[_key(name)] = _value(value)
        if found := _GPUS.search(line):
            reading.draft["gpus_per_run"] = int(found[1])
        if found := _RUNS.search(line):
            budget["runs"] = int(found[1])
        if found := _WALL.search(line):
            budget["wall"] = float(found[1]) * {"m": 60, "h": 3600, "d": 86400}[found[2][0].lower()]
        if found := _SEEDS.search(line):
            reading.draft.setdefault("stats", {})["seed_base"] = int(found[1])
        changed = before != (len(fixed), len(budget), "gpus_per_run" in reading.draft)
        if not changed and not _is_sentence_of_goal(line):
            reading.unread.append(line)
    if fixed:
        reading.draft["fixed"] = fixed
    if budget:
        reading.draft["budget"] = budget


def _is_sentence_of_goal(line: str) -> bool:
    patterns = (_THRESHOLD, _BEST, _BEST_FOR, _COMPARE, _INFLUENCE, _AT_LEAST, _NOT_WORSE, _RATIO, _LIST, _RANGE, _LAST)
    return bool(re.match(r"^(goal|constraints|original research)\b", line, re.I)) or any(
        p.search(line) for p in patterns
    )


def _key(name: str) -> str:
    return name.strip("`.").lower()


def _value(text: str) -> int | float | str | bool:
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(_NUM, text):
        return float(text)
    if text in {"true", "false"}:
        return text == "true"
    return text
