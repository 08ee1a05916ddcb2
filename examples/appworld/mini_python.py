"""A small part of Python, interpreted: calls of app APIs, variables, loops, conditions. It can reach nothing else.

    print(run("for e in apis.calendar.list(date='Monday'):\\n    print(e['title'])", call))

What always holds: there are no attributes but `apis.APP.API`, and no functions but a few; a program has a budget of
steps and of characters. An error ends the program and is part of what it printed, as in a shell.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

ApiCall = Callable[[str, str, Mapping[str, Any]], Any]
"""(app, API, arguments) → answer."""
_STEPS, _CHARACTERS = 2000, 4000
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "str": str, "int": int, "float": float, "sorted": sorted}


class MiniError(Exception):
    """The program asked for something that does not exist here."""


def run(program: str, call: ApiCall, variables: dict[str, Any] | None = None) -> str:
    """What it printed; a last line that is an expression is printed too. `variables` are kept from call to call."""
    interpreter = _Interpreter(call, {} if variables is None else variables)
    try:
        interpreter.block(ast.parse(program).body, last_is_shown=True)
    except (Exception, RecursionError) as error:  # noqa: BLE001 - whatever a program does wrong is told to its author
        interpreter.show(f"{type(error).__name__}: {error}")
    return "\n".join(interpreter.printed)[:_CHARACTERS]


class _Interpreter:
    def __init__(self, call: ApiCall, variables: dict[str, Any]) -> None:
        self._call = call
        self._variables = variables
        self._steps = 0
        self.printed: list[str] = []

    def show(self, *values: Any) -> None:
        self.printed.append(" ".join(map(str, values)))
        if sum(map(len, self.printed)) > _CHARACTERS:
            raise MiniError("the program printed too much")

    def block(self, statements: list[ast.stmt], *, last_is_shown: bool = False) -> None:
        for number, statement in enumerate(statements, 1):
            self._statement(statement, shown=last_is_shown and number == len(statements))

    def _statement(self, statement: ast.stmt, *, shown: bool) -> None:
        self._spend()
        match statement:
            case ast.Expr(value):
                result = self._value(value)
                if shown and result is not None:
                    self.show(repr(result))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._variables[name] = self._value(value)
            case ast.For(target=ast.Name(id=name), iter=items, body=body, orelse=[]):
                for item in list(self._value(items)):
                    self._variables[name] = item
                    self.block(body)
            case ast.If(test=test, body=body, orelse=orelse):
                self.block(body if self._value(test) else orelse)
            case ast.Pass() | ast.Import() | ast.ImportFrom():
                pass  # there is nothing to import, and saying so helps nobody
            case _:
                raise MiniError(f"line {statement.lineno}: {type(statement).__name__} is not supported here")

    def _value(self, node: ast.expr) -> Any:
        self._spend()
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(id=name):
                if name not in self._variables:
                    raise NameError(f"name {name!r} is not defined")
                return self._variables[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self._value(key): self._value(value) for key, value in pairs if key is not None}
            case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
                return self._value(value)[self._value(index)]
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value):
                return self._value(value)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BoolOp(op=op, values=values):
                results = [bool(self._value(value)) for value in values]
                return all(results) if isinstance(op, ast.And) else any(results)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._value(left), self._value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._value(left), self._value(right))
            case ast.Call():
                return self._called(node)
            case _:
                raise MiniError(f"line {node.lineno}: {type(node).__name__} is not supported here")

    def _called(self, node: ast.Call) -> Any:
        match node.func:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="apis"), attr=app), attr=api):
                if node.args or any(keyword.arg is None for keyword in node.keywords):
                    raise MiniError(f"apis.{app}.{api}: give its arguments by name")
                return self._call(app, api, {str(k.arg): self._value(k.value) for k in node.keywords})
            case ast.Name(id="print"):
                return self.show(*[self._value(argument) for argument in node.args])
            case ast.Name(id=name) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*[self._value(argument) for argument in node.args])
            case _:
                raise MiniError(
                    f"line {node.lineno}: only apis.APP.API(…), print and {', '.join(_FUNCTIONS)} can be called"
                )

    def _spend(self) -> None:
        self._steps += 1
        if self._steps > _STEPS:
            raise MiniError(f"the program took more than {_STEPS} steps")
