"""blueprint.yaml: one arm of an experiment, complete enough to start it anywhere; a run is an arm and a seed.

A blueprint's id is the hash of what decides its result (code, config, processes, metrics, kind of resource), so an
experiment asked for twice is the same blueprint whatever its name, stage or seeds. Commands are argv lists with
placeholders from a closed set; there is no shell.
"""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from a3r.formats import Part, Scalar, Seconds, canonical, dump, nearest_hint, parse_model, sha256, to_yaml
from a3r.results import FailureClass
from a3r.rules import Rule
from a3r.strictyaml import Document, FormatError, Problem, load_strict

PLACEHOLDERS = ("python", "seed", "spec", "attempt_dir", "run_dir", "ckpt")
"""Besides `{port:NAME}`. `{spec}` is the path of a JSON file that holds the configuration only: dotted key → value."""

ConfigValue = Scalar | None | list[Scalar]


class Ready(Part):
    """The process is up when this URL answers 2xx."""

    http: str
    within_s: Seconds = Field(default=300.0, gt=0)


class Process(Part):
    name: str = Field(pattern=r"^[a-z][a-z0-9_-]*$")
    argv: list[str] = Field(min_length=1)
    needs: list[str] = Field(default_factory=list)
    """Names of processes that must be ready first."""
    ready: Ready | None = None
    main: bool = False
    """Its exit status is the attempt's."""
    restart: Literal["never"] = "never"


class Code(Part):
    """Where the client is; None commit means the working tree as it is, whose state the run records."""

    repo: str = "."
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,40}$")
    patch_sha256: str | None = None
    worktree: bool = False


class Env(Part):
    variables: dict[str, str] = Field(default_factory=dict)
    secrets: list[str] = Field(default_factory=list)
    """Names of environment variables passed to the processes and never written down."""


class Resources(Part):
    kind: Literal["cpu", "gpu"] = "cpu"
    slots: int = Field(default=1, ge=1)
    """CPU slots of a run; ignored for kind gpu."""
    gpus: int = Field(default=0, ge=0)
    gpu_model: str = "any"
    same_host: bool = True
    disk_gb: float = Field(default=0.0, ge=0)
    ports: list[str] = Field(default_factory=list)
    """Names for `{port:NAME}`."""

    @model_validator(mode="after")
    def _kind(self) -> Self:
        if (self.kind == "gpu") != (self.gpus > 0):
            raise ValueError(
                f"kind {self.kind} with gpus {self.gpus}; set kind: gpu and gpus ≥ 1, or kind: cpu and gpus: 0"
            )
        return self


class Timeouts(Part):
    """The three clocks of an attempt, and how long a stop may take."""

    first_step_s: Seconds = Field(default=1200.0, gt=0)
    stall_s: Seconds = Field(default=600.0, gt=0)
    max_s: Seconds = Field(default=7200.0, gt=0)
    grace_s: Seconds = Field(default=15.0, ge=0)


class Metrics(Part):
    file: str = "metrics.jsonl"
    step_key: str = "step"
    required: list[str] = Field(default_factory=lambda: ["reward/mean"])
    """A completed run without these is a failure of class fabricated."""
    eval: str | None = None
    """File with numbers measured at the end: {metric: value | {value, n_items, n_samples}}."""
    steps: int | None = Field(default=None, ge=1)
    """Steps a completed run must show; fewer is class fabricated."""


class Above(Part):
    metric: str
    value: float
    for_steps: int = Field(default=1, ge=1)


class Stop(Part):
    """When a running attempt counts as diverged."""

    nan: Literal["diverged", "ignore"] = "diverged"
    above: list[Above] = Field(default_factory=list)


class Checkpoint(Part):
    dir: str = "{run_dir}/ckpt"
    resume_arg: list[str] = Field(default_factory=lambda: ["--resume"])
    """Appended to the main process' argv when an attempt follows another one of the same run."""
    every_steps: int = Field(default=1, ge=1)
    keep: bool = True
    """False: `dir` is deleted once the run has completed; a study of many runs would fill the disk with weights."""


class OomRetry(Part):
    times: int = Field(default=0, ge=0)
    change: dict[str, str] = Field(default_factory=dict)
    """Key → `/2` or `*2`: declared here or not done; the factor under study is never changed."""


class Retry(Part):
    """Attempts after the first, by failure class; what is not listed is not retried."""

    infra: int = Field(default=5, ge=0)
    lost: int = Field(default=3, ge=0)
    stalled: int = Field(default=2, ge=0)
    timeout: int = Field(default=0, ge=0)
    code: int = Field(default=0, ge=0)
    external: Literal["pause_arm", "fail"] = "pause_arm"
    oom: OomRetry = OomRetry()

    def times(self, failure: FailureClass) -> int:
        counted = {
            FailureClass.INFRA: self.infra,
            FailureClass.LOST: self.lost,
            FailureClass.STALLED: self.stalled,
            FailureClass.TIMEOUT: self.timeout,
            FailureClass.CODE: self.code,
            FailureClass.OOM: self.oom.times,
        }
        return counted.get(failure, 0)


class Estimate(Part):
    run_s: Seconds = Field(gt=0)
    basis: str = "guess"


class Blueprint(Part):
    schema_: Literal["a3r/blueprint/v1"] = Field(default="a3r/blueprint/v1", alias="schema")
    id: str | None = None
    """`sha256:…`; filled by `sealed()`, checked when given."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]{0,80}$")
    """The arm: part of paths and window names."""
    stage: int = Field(default=0, ge=0)
    hypothesis: str = ""
    preregistered: list[Rule] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=list)
    config: dict[str, ConfigValue] = Field(default_factory=dict)
    """Dotted key → value; sections are flattened when read."""
    code: Code = Code()
    env: Env = Env()
    processes: list[Process] = Field(min_length=1)
    resources: Resources = Resources()
    timeouts: Timeouts = Timeouts()
    metrics: Metrics = Metrics()
    stop: Stop = Stop()
    checkpoint: Checkpoint | None = None
    retry: Retry = Retry()
    estimate: Estimate | None = None

    @field_validator("config", mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return flatten_config(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in structure_problems(self):
            raise ValueError(problem)
        if self.id is not None and self.id != self.computed_id():
            raise ValueError(f"id {self.id} is not the hash of this content; remove the id, it is computed")
        return self

    def computed_id(self) -> str:
        """`sha256:<hex>` of {code, config, processes, metrics, resources.kind}."""
        data = dump(self)
        essence = {key: data[key] for key in ("code", "config", "processes", "metrics")}
        return "sha256:" + sha256(canonical(essence | {"kind": self.resources.kind}))

    def sealed(self, **changes: Any) -> Blueprint:
        """A validated copy with `changes` applied and the id filled in."""
        data = dump(self) | changes | {"id": None}
        draft = Blueprint.model_validate_json(json.dumps(data))
        return draft.model_copy(update={"id": draft.computed_id()})

    @property
    def main(self) -> Process:
        return next(p for p in self.processes if p.main)

    def start_order(self) -> list[Process]:
        """Processes, each after those it needs."""
        done: list[Process] = []
        left = list(self.processes)
        while left:
            ready = [p for p in left if set(p.needs) <= {d.name for d in done}]
            done += ready
            left = [p for p in left if p not in ready]
        return done

    def to_yaml(self) -> str:
        return to_yaml(dump(self))


def flatten_config(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` → `{"optim.lr": 1}`."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        inner = flatten_config(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        twice = sorted(set(inner) & set(out))
        if twice:
            raise ValueError(f"{twice[0]} is given twice; keep one of them")
        out.update(inner)
    return out


_FIELD = re.compile(r"^port:([A-Za-z0-9_-]+)$")


def placeholders(text: str) -> list[str]:
    """Names between braces. `{{` and `}}` are literal braces."""
    return [name for _, name, _, _ in _split(text) if name is not None]


def _split(text: str) -> list[tuple[str, str | None, str | None, str | None]]:
    parts = []
    for literal, name, spec, conversion in string.Formatter().parse(text):
        full = f"{name}:{spec}" if name is not None and spec else name
        parts.append((literal, full, spec, conversion))
    return parts


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders; `values` has `port:NAME` keys for ports.

    Raises:
        KeyError: a placeholder without a value.
    """
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in _split(text))


def structure_problems(blueprint: Blueprint) -> list[str]:
    """What types cannot say: `problem; fix` sentences."""
    out: list[str] = []
    names = [p.name for p in blueprint.processes]
    out += [f"two processes are called {n!r}; rename one" for n in sorted({n for n in names if names.count(n) > 1})]
    if sum(p.main for p in blueprint.processes) != 1:
        out.append("exactly one process must have main: true; its exit status is the run's")
    for process in blueprint.processes:
        out += [
            f"process {process.name!r} needs unknown {n!r}; {nearest_hint(n, names)}"
            for n in process.needs
            if n not in names
        ]
        texts = [*process.argv, *([process.ready.http] if process.ready else [])]
        out += [p for text in texts for p in _placeholder_problems(text, blueprint.resources.ports)]
    if not out and _has_cycle(blueprint.processes):
        out.append("processes need each other in a circle; remove one of the needs")
    if len(set(blueprint.seeds)) != len(blueprint.seeds):
        out.append("a seed is listed twice; list each once")
    return out


def _placeholder_problems(text: str, ports: list[str]) -> list[str]:
    try:
        names = placeholders(text)
    except ValueError:
        return [f"unbalanced braces in {text!r}; write {{{{ and }}}} for literal braces"]
    out = []
    for name in names:
        port = _FIELD.match(name)
        if port and port[1] not in ports:
            out.append(f"{{{name}}} names a port that resources.ports lacks; add {port[1]!r} there")
        elif not port and name not in PLACEHOLDERS:
            known = [*PLACEHOLDERS, "port:NAME"]
            out.append(f"unknown placeholder {{{name}}} in {text!r}; {nearest_hint(name, known)}")
    return out


def _has_cycle(processes: list[Process]) -> bool:
    done: set[str] = set()
    while True:
        ready = {p.name for p in processes if p.name not in done and set(p.needs) <= done}
        if not ready:
            return len(done) < len(processes)
        done |= ready


def load_blueprint(path: Path) -> tuple[Blueprint, Document]:
    """Read and validate one file; the document gives line numbers for later checks.

    Raises:
        FormatError: unreadable, not strict YAML, or not a blueprint.
    """
    document = load_strict(read_text(path), str(path))
    return parse_model(Blueprint, document), document


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        FormatError: missing, a directory, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FormatError([Problem(str(path), "no such file", "check the path")]) from None
    except UnicodeDecodeError:
        raise FormatError([Problem(str(path), "not UTF-8 text", "save it as UTF-8")]) from None
    except OSError as error:
        raise FormatError(
            [Problem(str(path), f"cannot be read: {error.strerror}", "check path and permissions")]
        ) from None


# --- what the client accepts ---------------------------------------------------------------------------------------


class ClientSchemaError(RuntimeError):
    """The client did not say which keys it takes."""


def schema_argv(blueprint: Blueprint, python: str | None = None) -> list[str]:
    """The command that prints the client's schema: the main process up to its first option with a placeholder, plus
    `--print-schema`."""
    head: list[str] = []
    for word in blueprint.main.argv:
        if word == "--config" or (placeholders(word) and word != "{python}"):
            break
        head.append(fill(word, {"python": python or sys.executable}))
    return [*head, "--print-schema"]


def client_schema(blueprint: Blueprint, root: Path, python: str | None = None) -> dict[str, Any]:
    """The JSON Schema of the configuration keys the client takes: `properties` maps dotted keys.

    Args:
        root: directory in which the client runs.

    Raises:
        ClientSchemaError: the client failed, took over 60 s, or printed something else.
    """
    return json.loads(_ask_schema(tuple(schema_argv(blueprint, python)), str(root)))


@lru_cache(maxsize=64)
def _ask_schema(argv: tuple[str, ...], cwd: str) -> str:
    command = " ".join(argv)
    # The client imports what this process can import, also from a source tree that is not installed.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(p or ".").resolve()) for p in sys.path)}
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise ClientSchemaError(f"{argv[0]}: no such program; check the blueprint's argv") from None
    except subprocess.TimeoutExpired:
        raise ClientSchemaError(
            f"`{command}` did not end within 60 s; --print-schema must not start a training"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ClientSchemaError(f"`{command}` ended with {done.returncode}: {last}")
    try:
        schema = json.loads(done.stdout)
        schema["properties"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ClientSchemaError(f"`{command}` did not print a JSON Schema object with properties") from None
    return done.stdout


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def config_problems(config: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Key → (problem, fix) of every key the client would not take as asked."""
    properties = flat_properties(schema)
    out: dict[str, tuple[str, str]] = {}
    for key, value in config.items():
        if key not in properties:
            out[key] = ("the client does not know this key", nearest_hint(key, sorted(properties)))
        elif wrong := value_problem(value, properties[key], schema):
            out[key] = wrong
    for key in schema.get("required", ()):
        if key not in config and not any(k.startswith(f"{key}.") for k in config):
            out[key] = ("the client needs this key", f"add `{key}: …`")
    return out


def flat_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key → schema of a leaf; takes flat dotted properties and nested objects with `$ref` alike."""
    out: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, sub in node.get("properties", {}).items():
            objects = [o for o in _variants(sub, schema) if o.get("properties")]
            if objects:
                walk(objects[0], f"{prefix}{name}.")
            else:
                out[f"{prefix}{name}"] = sub

    walk(schema, "")
    return out


def _variants(sub: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "$ref" in sub:
        node: Any = root
        for part in str(sub["$ref"]).removeprefix("#/").split("/"):
            node = node.get(part, {})
        return _variants(node, root)
    if "anyOf" in sub or "oneOf" in sub:
        return [v for s in sub.get("anyOf", sub.get("oneOf", [])) for v in _variants(s, root)]
    if "allOf" in sub and len(sub["allOf"]) == 1:
        return _variants(sub["allOf"][0], root)
    return [sub]


def value_problem(value: Any, sub: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, str] | None:
    """(problem, fix) if the value fits no variant of a key's schema."""
    tried = [_variant_problem(value, variant) for variant in _variants(sub, root)]
    return None if not tried or None in tried else tried[0]


def _variant_problem(value: Any, variant: Mapping[str, Any]) -> tuple[str, str] | None:
    kinds = variant.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{value!r} is not of type {' or '.join(kinds)}", "write a value of that type"
    if "enum" in variant and value not in variant["enum"]:
        return f"{value!r} is not one of {variant['enum']}", nearest_hint(str(value), [str(v) for v in variant["enum"]])
    if "const" in variant and value != variant["const"]:
        return f"{value!r} is not {variant['const']!r}", f"write {variant['const']!r}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bound_problem(value, variant)
    return None


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _bound_problem(value: float, variant: Mapping[str, Any]) -> tuple[str, str] | None:
    bounds = {
        "minimum": ("at least", lambda b: value >= b),
        "exclusiveMinimum": ("more than", lambda b: value > b),
        "maximum": ("at most", lambda b: value <= b),
        "exclusiveMaximum": ("less than", lambda b: value < b),
    }
    for name, (words, holds) in bounds.items():
        bound = variant.get(name)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and not holds(bound):
            return f"{value!r} must be {words} {bound}", "change the value"
    return None
