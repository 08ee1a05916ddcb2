"""From goal.md to goal.lock.yaml: front matter read strictly, prose by its documented phrases, gaps asked about.

Order of precedence: answers, front matter, prose. The client's own schema is asked, so that a factor it does not know
or a level of the wrong type is refused before anything runs. Nothing is written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from a3r.blueprint import (
    Blueprint,
    ClientSchemaError,
    client_schema,
    config_problems,
    flat_properties,
    load_blueprint,
    read_text,
    value_problem,
)
from a3r.formats import Scalar, dump, nearest_hint, parse_model, problems_of, sha256
from a3r.goal import Goal, GoalLock
from a3r.prose import Reading, read_prose
from a3r.strictyaml import Document, FormatError, Problem, load_strict

CLIENT_NAMES = {
    "batch_size": "batch_tasks",
    "train_batch_size": "batch_tasks",
    "max_response_length_in_one_turn": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "ppo_epoch": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "mini_batch_num": "algorithm.mini_batches",
    "total_training_steps": "max_steps",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
}
"""Names people use → the key of swarmtune's clients; taken only when the client lacks the first and has the second."""


@dataclass(frozen=True)
class OpenQuestion:
    """Something a goal does not say and that is not guessed."""

    key: str
    """Dotted key of front matter that answers it."""
    ask: str
    kind: Literal["choice", "levels", "criterion", "path", "text"]
    choices: tuple[str, ...] = ()
    suggestion: Any = None
    """A value that would be valid; never taken without a person's yes."""

    def __str__(self) -> str:
        choice = f" ({', '.join(self.choices)})" if self.choices else ""
        hint = f"\n    for example {self.key}: {_flow(self.suggestion)}" if self.suggestion is not None else ""
        return f"{self.key}: {self.ask}{choice}{hint}"


class OpenQuestionsError(ValueError):
    """The goal cannot be compiled yet; `questions` are to be answered in front matter or with `--set key=value`."""

    def __init__(self, source: str, questions: list[OpenQuestion], draft: Mapping[str, Any], prose: str) -> None:
        self.questions = questions
        self.draft = dict(draft)
        """What is understood so far, by the keys of front matter."""
        self.prose = prose
        lines = [f"{source}: {len(questions)} open question(s); answer them in front matter or with --set KEY=VALUE"]
        super().__init__("\n".join([*lines, *(f"  {i}. {q}" for i, q in enumerate(questions, 1))]))


@dataclass
class Source:
    """A goal file, taken apart."""

    name: str
    front: Document
    prose: str
    sha256: str
    reading: Reading = field(default_factory=Reading)


_FENCE = re.compile(r"^---\s*$")


def read_goal(path: Path) -> Source:
    """Read goal.md.

    Raises:
        FormatError: missing, not UTF-8, front matter not closed or not strict YAML.
    """
    text = read_text(path).lstrip("\ufeff")
    lines = text.splitlines()
    name = str(path)
    front, prose = Document(name, {}, {(): 1}), text
    if lines and _FENCE.match(lines[0]):
        end = next((i for i, line in enumerate(lines[1:], 1) if _FENCE.match(line)), None)
        if end is None:
            raise FormatError([Problem(f"{name}:1", "front matter is not closed", "add a line with --- after it")])
        front = load_strict("\n".join(lines[1:end]) + "\n", name, first_line=2)
        if front.data is None:
            front = Document(name, {}, {(): 1})
        if not isinstance(front.data, dict):
            raise FormatError([Problem(f"{name}:2", "front matter must be `key: value` lines", "see docs/studies.md")])
        prose = "\n".join(lines[end + 1 :])
    if not text.strip():
        raise FormatError([Problem(name, "the file is empty", "write what is to be found out; see docs/studies.md")])
    return Source(name, front, prose.strip(), sha256(text), read_prose(prose))


def compile_goal(
    path: Path,
    answers: Mapping[str, Any] | None = None,
    root: Path | None = None,
    python: str | None = None,
    compiled_by: Literal["llm"] | None = None,
) -> GoalLock:
    """Compile a goal file.

    Args:
        answers: dotted key → value, on top of everything the file says.
        root: directory in which clients run (their schema is asked for there); default: the current directory.

    Raises:
        FormatError: something in the file is wrong; lines and fixes are in it.
        OpenQuestionsError: something is missing.
    """
    source = read_goal(path)
    draft = _merge(source.reading.draft, _front_data(source))
    for key, value in (answers or {}).items():
        _put(draft, key, value)
    questions = open_questions(draft)
    if questions:
        raise OpenQuestionsError(source.name, questions, draft, source.prose)
    document = Document(source.name, draft, source.front.lines)
    goal = parse_model(Goal, document)
    base = _base_blueprint(path, goal, document)
    goal, base, renamed = _fit_to_client(goal, base, document, root or Path.cwd(), python)
    only_front = _understood(_front_data(source))
    by = compiled_by or ("front_matter" if only_front else "parser")
    ignored = [f"not read by the parser: {line}" for line in source.reading.unread if not only_front]
    assumptions = [] if only_front else source.reading.assumptions
    return GoalLock(
        goal=goal,
        base=base,
        prose=source.prose,
        compiled_by=by,
        assumptions=[*assumptions, *renamed, *ignored],
        source_sha256=source.sha256,
    )


def _front_data(source: Source) -> dict[str, Any]:
    return source.front.data if isinstance(source.front.data, dict) else {}


def _understood(front: Mapping[str, Any]) -> bool:
    """Whether front matter alone is a whole goal."""
    question = front.get("question")
    return isinstance(question, Mapping) and {"type", "factor", "levels", "criterion"} <= set(question)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` wins; mappings are merged, moderators by their factor, criteria not across different rules."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if key == "moderators" and isinstance(old, list) and isinstance(value, list):
            out[key] = _merge_moderators(old, value)
        elif key not in {"rule", "at", "reference"} and isinstance(old, Mapping) and isinstance(value, Mapping):
            out[key] = _merge(old, value)
        else:
            out[key] = value
    return out


def _merge_moderators(below: list[Any], above: list[Any]) -> list[Any]:
    named = {m["factor"]: m for m in below if isinstance(m, Mapping) and "factor" in m}
    for moderator in above:
        if not isinstance(moderator, Mapping) or "factor" not in moderator:
            return above
        named[moderator["factor"]] = {**named.get(moderator["factor"], {}), **moderator}
    return list(named.values())


def _put(draft: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; `question.moderators.NAME.levels` finds the moderator by its factor."""
    parts = key.split(".")
    if parts[:2] == ["question", "moderators"] and len(parts) > 3:
        name, leaf = ".".join(parts[2:-1]), parts[-1]
        moderators = draft.setdefault("question", {}).setdefault("moderators", [])
        found = next((m for m in moderators if m.get("factor") == name), None)
        if found is None:
            found = {"factor": name}
            moderators.append(found)
        found[leaf] = value
        return
    where = draft
    for part in parts[:-1]:
        inner = where.get(part)
        where[part] = inner if isinstance(inner, dict) else {}
        where = where[part]
    where[parts[-1]] = value


def open_questions(draft: Mapping[str, Any]) -> list[OpenQuestion]:
    """What a draft does not say yet."""
    out: list[OpenQuestion] = []
    question = draft.get("question")
    question = question if isinstance(question, Mapping) else {}
    if not draft.get("title"):
        out.append(OpenQuestion("title", "What is the study called?", "text"))
    kind = question.get("type")
    if kind is None:
        types = ("min_that_still", "max_that_still", "best", "compare", "effect")
        out.append(OpenQuestion("question.type", "What kind of question is it?", "choice", types))
    if question.get("factor") is None:
        out.append(OpenQuestion("question.factor", "Which configuration key is varied?", "text"))
    factor = question.get("factor", "the factor")
    if question.get("levels") is None:
        out.append(
            OpenQuestion("question.levels", f"At which values is {factor} tested?", "levels", suggestion=[1, 2, 4])
        )
    for moderator in question.get("moderators", []) or []:
        if isinstance(moderator, Mapping) and moderator.get("levels") is None and moderator.get("factor"):
            name = moderator["factor"]
            out.append(
                OpenQuestion(f"question.moderators.{name}.levels", f"At which values is {name} tested?", "levels")
            )
    out += _criterion_questions(kind, question)
    if draft.get("base") is None:
        out.append(
            OpenQuestion(
                "base", "Which blueprint runs one experiment (path, relative to the goal)?", "path",
                suggestion="../simulated.yaml",
            )
        )  # fmt: skip
    return out


def _criterion_questions(kind: Any, question: Mapping[str, Any]) -> list[OpenQuestion]:
    criterion = question.get("criterion")
    criterion = criterion if isinstance(criterion, Mapping) else {}
    threshold = kind in {"min_that_still", "max_that_still"}
    if criterion.get("metric") and (criterion.get("rule") or not threshold):
        return []
    if not threshold:
        return [
            OpenQuestion("question.criterion.metric", "Which number is compared?", "text", suggestion="reward/mean")
        ]
    levels = question.get("levels")
    edge = levels[-1 if kind == "min_that_still" else 0] if isinstance(levels, list) and levels else None
    suggestion: dict[str, Any] = {"metric": criterion.get("metric", "reward/mean"), "at": {"last_k": 5}}
    if edge is not None:
        suggestion |= {"reference": {"level": edge}, "rule": {"ratio_at_least": 0.9}}
    else:
        suggestion |= {"rule": {"at_least": 0.5}}
    return [
        OpenQuestion(
            "question.criterion", "By which number, and from which value on, does a level count as good enough?",
            "criterion", suggestion=suggestion,
        )
    ]  # fmt: skip


# --- the base blueprint and its client -------------------------------------------------------------------------------


def _base_blueprint(path: Path, goal: Goal, document: Document) -> Blueprint:
    base_path = (path.parent / goal.base).resolve()
    if not base_path.is_file():
        where = document.where(("base",))
        raise FormatError(
            [Problem(where, f"no blueprint at {goal.base}", "paths are relative to the goal", key="base")]
        )
    base, _ = load_blueprint(base_path)
    changes: dict[str, Any] = {"config": {**base.config, **goal.fixed}, "seeds": []}
    if goal.gpus_per_run is not None:
        kind = "gpu" if goal.gpus_per_run else "cpu"
        changes["resources"] = dump(base.resources) | {"kind": kind, "gpus": goal.gpus_per_run}
    try:
        return base.sealed(**changes)
    except ValidationError as error:
        raise FormatError(problems_of(error, Blueprint, document)) from None


def _fit_to_client(
    goal: Goal, base: Blueprint, document: Document, root: Path, python: str | None
) -> tuple[Goal, Blueprint, list[str]]:
    """Names as the client spells them, values as it takes them; with the renamings made."""
    try:
        schema = client_schema(base, root, python)
    except ClientSchemaError as error:
        where = document.where(("base",))
        raise FormatError(
            [Problem(where, str(error), "repair the client or the blueprint's argv", key="base")]
        ) from None
    goal, base, renamed = _rename(goal, base, flat_properties(schema))
    problems = _factor_problems(goal, document, schema)
    known = {m.factor for m in goal.question.moderators} | {goal.question.factor}
    examples: dict[str, Scalar] = {goal.question.factor: goal.question.levels[0]}
    examples |= {m.factor: m.levels[0] for m in goal.question.moderators}
    for key, (problem, fix) in config_problems({**base.config, **examples}, schema).items():
        if key not in known:
            where = document.where(("fixed", key)) if key in goal.fixed else f"{document.name} (base {goal.base})"
            problems.append(Problem(where, problem, fix, key=key))
    problems += [
        Problem(document.where(("fixed", key)), "both fixed and varied", "remove it from fixed", key=key)
        for key in goal.fixed
        if key in known
    ]
    if problems:
        raise FormatError(problems)
    return goal, base, renamed


def _factor_problems(goal: Goal, document: Document, schema: Mapping[str, Any]) -> list[Problem]:
    properties = flat_properties(schema)
    question = goal.question
    factors = [(question.factor, question.levels, ("question", "factor"), ("question", "levels"))]
    for i, m in enumerate(question.moderators):
        here = ("question", "moderators", i)
        factors.append((m.factor, m.levels, (*here, "factor"), (*here, "levels")))  # type: ignore[arg-type]
    out = []
    for name, levels, at_name, at_levels in factors:
        if name not in properties:
            fix = nearest_hint(name, sorted(properties))
            out.append(Problem(document.where(at_name), f"the client does not know the factor {name!r}", fix, key=name))
            continue
        wrong = [(level, p) for level in levels if (p := value_problem(level, properties[name], schema))]
        out += [Problem(document.where(at_levels), f"level {level!r}: {p[0]}", p[1], key=name) for level, p in wrong]
    return out


def _rename(goal: Goal, base: Blueprint, properties: Mapping[str, Any]) -> tuple[Goal, Blueprint, list[str]]:
    names = {goal.question.factor, *(m.factor for m in goal.question.moderators), *goal.fixed}
    change: dict[str, str] = {}
    for name in sorted(names - set(properties)):
        target = CLIENT_NAMES.get(name)
        alike = [key for key in properties if _plain(key) == _plain(name)]
        if target in properties:
            change[name] = str(target)
        elif len(alike) == 1:
            change[name] = alike[0]
    if not change:
        return goal, base, []
    data = dump(goal)
    data["question"]["factor"] = change.get(goal.question.factor, goal.question.factor)
    for moderator in data["question"]["moderators"]:
        moderator["factor"] = change.get(moderator["factor"], moderator["factor"])
    data["fixed"] = {change.get(k, k): v for k, v in goal.fixed.items()}
    config = {change.get(k, k): v for k, v in base.config.items()}
    notes = [f"{name} is the client's {key}" for name, key in change.items()]
    return Goal.model_validate_json(json.dumps(data)), base.sealed(config=config), notes


def _plain(name: str) -> str:
    return name.rsplit(".", 1)[-1].replace("_", "").rstrip("s").lower()


def _flow(value: Any) -> str:
    return json.dumps(value).replace('"', "")


# --- the lock --------------------------------------------------------------------------------------------------------


def read_lock(text: str, name: str = "goal.lock.yaml") -> GoalLock:
    """Read a lock and check its hash.

    Raises:
        FormatError: not a lock, or edited since it was written.
    """
    document = load_strict(text, name)
    data = dict(document.data) if isinstance(document.data, dict) else {}
    claimed = data.pop("hash", None)
    lock = parse_model(GoalLock, Document(name, data, document.lines))
    if claimed != lock.hash:
        fix = "restore it, or compile goal.md again into a new directory"
        raise FormatError([Problem(document.where(("hash",)), "the content does not match its hash", fix, key="hash")])
    return lock


def parse_answers(settings: list[str]) -> dict[str, Any]:
    """`["question.levels=[1, 2]"]` → `{"question.levels": [1, 2]}`.

    Raises:
        FormatError: no `=`, or a value that is not strict YAML.
    """
    out: dict[str, Any] = {}
    for setting in settings:
        key, found, text = setting.partition("=")
        if not found or not key.strip():
            raise FormatError([Problem(f"--set {setting}", "no KEY=VALUE", "write --set question.levels=[1,2,4]")])
        out[key.strip()] = load_strict(text, f"--set {key.strip()}").data
    return out
