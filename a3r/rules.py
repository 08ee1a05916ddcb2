"""Pre-registered rules: what will follow from which outcome, written before the outcome is known.

A condition is a Python-like expression over numbers of the stage table: names, calls such as `ci_low(diff)`, numbers,
 `+ - * /`, comparisons, `and or not`. It is parsed with `ast` and interpreted here, never given to `eval`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from a3r.formats import Part

NAMES = frozenset({"n", "mean", "sd", "median", "ci_low", "ci_high", "margin", "p", "diverged", "missing", "alpha"})
"""Numbers of a stage table; each may be taken of a column: `ci_low(diff)` is the key `ci_low(diff)`."""
COLUMNS = frozenset({"arm", "reference", "diff", "ratio", "interaction"})


class RuleError(ValueError):
    """A condition that is not in the language; the message says where and what is allowed."""


class Outcome(Part):
    mark: str
    """passes, fails, undecided, better, worse, equivalent, …"""
    next: str = ""
    """What the leader does then."""


class Rule(Part):
    """`{if: …, then: …}`, or `{else: …}` as the last of a list."""

    if_: str | None = Field(default=None, alias="if")
    then: Outcome | None = None
    else_: Outcome | None = Field(default=None, alias="else")

    @model_validator(mode="after")
    def _shape(self) -> Self:
        if self.else_ is not None:
            if self.if_ is not None or self.then is not None:
                raise ValueError("a rule is {if, then} or {else}, not both; write two rules")
        elif self.if_ is None or self.then is None:
            raise ValueError("a rule needs both if and then; or a single else as the last rule")
        else:
            parse(self.if_)
        return self


def when(condition: str, mark: str, next: str = "") -> Rule:
    return Rule.model_validate({"if": condition, "then": Outcome(mark=mark, next=next)})


def otherwise(mark: str, next: str = "") -> Rule:
    return Rule.model_validate({"else": Outcome(mark=mark, next=next)})


def fired(rules: list[Rule], values: Mapping[str, float]) -> tuple[int, Outcome] | None:
    """The first rule that holds: its index and outcome; None if none does.

    Raises:
        RuleError: a condition names a number that `values` lacks.
    """
    for i, rule in enumerate(rules):
        if rule.else_ is not None:
            return i, rule.else_
        if rule.if_ is not None and rule.then is not None and evaluate(rule.if_, values):
            return i, rule.then
    return None


def evaluate(condition: str, values: Mapping[str, float]) -> bool:
    return bool(_value(parse(condition), values, condition))


def parse(condition: str) -> ast.expr:
    """The condition's syntax tree, checked against the language.

    Raises:
        RuleError
    """
    if len(condition) > 500:
        raise RuleError("condition longer than 500 characters; split it into several rules")
    try:
        tree = ast.parse(condition.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise RuleError(f"{condition!r} is not an expression ({error}); example: ci_low(diff) > -0.03") from None
    _check(tree, condition)
    return tree


_COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _check(node: ast.expr, condition: str) -> None:
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check(value, condition)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
            _check(operand, condition)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, condition)
            _check(right, condition)
        case ast.Compare(left=left, ops=ops, comparators=right) if all(type(o) in _COMPARE for o in ops):
            for value in [left, *right]:
                _check(value, condition)
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            pass
        case ast.Name(id=name) if name in NAMES:
            pass
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id=column)], keywords=[]) if (
            name in NAMES and column in COLUMNS
        ):
            pass
        case _:
            raise RuleError(
                f"{ast.unparse(node)!r} is not allowed in {condition!r}; allowed are numbers, + - * /, comparisons, "
                f"and, or, not, the names {', '.join(sorted(NAMES))}, each alone or of a column "
                f"({', '.join(sorted(COLUMNS))})"
            )


def _value(node: ast.expr, values: Mapping[str, float], condition: str) -> float | bool:
    match node:
        case ast.BoolOp(op=op, values=parts):
            each = (_value(part, values, condition) for part in parts)
            return all(each) if isinstance(op, ast.And) else any(each)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values, condition)
        case ast.UnaryOp(op=op, operand=operand):
            inner = _value(operand, values, condition)
            return -inner if isinstance(op, ast.USub) else inner
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, values, condition), _value(right, values, condition)
            try:
                return _BINARY[type(op)](a, b)
            except ZeroDivisionError:
                raise RuleError(f"division by zero in {condition!r}; compare products instead") from None
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_value(term, values, condition) for term in [left, *comparators]]
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, terms, terms[1:], strict=False))
        case ast.Constant(value=value) if isinstance(value, int | float):
            return value
        case _:
            key = ast.unparse(node)
            if key not in values:
                raise RuleError(f"{condition!r} names {key}, which this stage's table lacks; it has {sorted(values)}")
            return values[key]
