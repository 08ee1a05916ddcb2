"""What every file format shares: the strict base model, canonical bytes, hashes, errors with line, problem and fix."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from a3r.strictyaml import FLOAT, TRAPS, Document, FormatError, Path, Problem, dotted

Scalar = bool | int | float | str
"""A factor level or a configuration value."""


class Part(BaseModel):
    """A piece of a file format: unknown keys are errors, text is never taken for a number, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


M = TypeVar("M", bound=BaseModel)

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+$")


def parse_duration(value: object) -> object:
    """`"1h30m"` → 5400.0; a number is seconds; anything else is returned for the model to refuse."""
    if isinstance(value, str):
        text = value.replace(" ", "")
        if not _DURATION.match(text):
            raise ValueError(f"{value!r} is not a duration; write seconds (90) or units (1h30m)")
        return sum(float(n) * _UNITS[u] for n, u in re.findall(r"(\d+(?:\.\d+)?)([smhd])", text))
    return value


Seconds = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds as a number, or text with units: `20m`, `1h30m`."""


def canonical(data: Any) -> str:
    """JSON with sorted keys and no spaces: equal data gives equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def dump(model: BaseModel) -> dict[str, Any]:
    """Plain JSON data of a model, by the names used in files."""
    return model.model_dump(mode="json", by_alias=True)


def to_yaml(data: Mapping[str, Any]) -> str:
    """YAML for people that `load_strict` reads back to the same data."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:float", repr(value))


_Dumper.add_representer(float, _float)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
for _pattern, _, _ in TRAPS:  # text that looks like a trap gets quotes
    _Dumper.add_implicit_resolver("tag:yaml.org,2002:trap", _pattern, None)


def parse_model(model: type[M], document: Document) -> M:
    """Validate a document.

    Raises:
        FormatError: one problem per wrong key, with its line and how to fix it.
    """
    if not isinstance(document.data, Mapping):
        raise FormatError(
            [Problem(document.where(), "expected `key: value` lines", "see docs/studies.md for an example")]
        )
    try:
        # Through JSON: strict mode then takes lists for tuples and names for enums, but still no text for a number.
        return model.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        raise FormatError(problems_of(error, model, document)) from None


def problems_of(error: ValidationError, model: type[BaseModel], document: Document) -> list[Problem]:
    """Pydantic's errors as problems with lines; errors of untaken union branches are folded into one."""
    out: dict[Path, Problem] = {}
    for item in error.errors():
        path = _path_in(document.data, item["loc"])
        if path in out and item["type"] != "extra_forbidden":
            continue
        out[path] = _problem(item, path, model, document)
    return list(out.values())


def _problem(item: Any, path: Path, model: type[BaseModel], document: Document) -> Problem:
    where, key = document.where(path), dotted(path)
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        known = sorted(_names(_model_at(model, path[:-1])))
        return Problem(where, "unknown key", nearest_hint(str(path[-1]), known), key=key)
    if kind == "missing":
        name = dotted((*path, *item["loc"][-1:]))
        return Problem(document.where(path), "missing", f"add `{item['loc'][-1]}: …`", key=name)
    if kind in {"int_type", "float_type"} and isinstance(item["input"], str):
        return Problem(where, f"{item['input']!r} is text where a number is due", "remove the quotes", key=key)
    if kind == "list_type":
        return Problem(where, f"expected a list (got {item['input']!r})", "write [a, b]; there is no shell", key=key)
    if kind.endswith("_type") or kind == "int_from_float":
        return Problem(where, f"{message} (got {item['input']!r})", "see `a3r schema export`", key=key)
    problem, _, fix = message.partition("; ")
    return Problem(where, problem, fix, key=key)


def nearest_hint(word: str, known: list[str]) -> str:
    """`did you mean 'x'?`, or the list of what is known."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or [
        k for k in known if k.rsplit(".", 1)[-1] == word.rsplit(".", 1)[-1]
    ]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}" if len(known) <= 40 else f"known: {', '.join(known[:40])}, …"


def _path_in(data: Any, loc: tuple[Any, ...]) -> Path:
    """The part of an error's location that exists in the data: union and validator names are dropped."""
    path: list[str | int] = []
    for part in loc:
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            path.append(part)
            data = data[part]
    return tuple(path)


def _model_at(model: Any, path: Path) -> type[BaseModel] | None:
    for part in path:
        if isinstance(part, int):
            continue
        found = None
        for name, info in getattr(model, "model_fields", {}).items():
            if part in (name, info.alias):
                found = next(iter(_models(info.annotation)), None)
        model = found
    return model


def _names(model: type[BaseModel] | None) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()] if model else []


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) or () for m in _models(arg)]
