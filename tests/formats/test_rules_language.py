"""Pre-registered rules: a closed language that computes and does nothing else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from a3r.rules import Rule, RuleError, evaluate, fired, otherwise, parse, when

VALUES = {"ci_low(diff)": -0.01, "ci_high(diff)": 0.05, "n": 3.0, "mean(arm)": 0.5}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("ci_low(diff) > -0.03", True),
        ("ci_low(diff) > -0.03 and ci_high(diff) < 0.03", False),
        ("not (n < 3) or mean(arm) == 0.5", True),
        ("0 < mean(arm) < 1", True),
        ("mean(arm) - 2 * ci_high(diff) >= 0.4", True),
        ("n / 3 != 1", False),
    ],
)
def test_conditions(condition: str, expected: bool) -> None:
    assert evaluate(condition, VALUES) is expected


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "mean.__class__",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "n ** 99999999",
        "'a' < 'b'",
        "mean(arm, arm)",
        "mean(other)",
        "unknown > 1",
        "n > 1; n < 2",
        "x := 3",
        "",
        "True",
        "n if n else 1",
        "(" * 300 + "n" + ")" * 300,
        "n > 1" + " and n > 1" * 200,
    ],
)
def test_everything_else_is_refused(condition: str) -> None:
    with pytest.raises(RuleError):
        parse(condition)


def test_missing_number_and_division_by_zero_are_errors() -> None:
    with pytest.raises(RuleError, match="lacks"):
        evaluate("p < 0.05", VALUES)
    with pytest.raises(RuleError, match="division by zero"):
        evaluate("1 / (n - 3) > 0", VALUES)


def test_first_rule_that_holds_fires() -> None:
    rules = [when("ci_low(diff) > 0", "better"), when("ci_high(diff) < 0", "worse"), otherwise("undecided")]
    found = fired(rules, VALUES)
    assert found is not None
    assert (found[0], found[1].mark) == (2, "undecided")


@pytest.mark.parametrize("data", [{"if": "n > 1"}, {"then": {"mark": "x"}}, {"if": "n > 1", "else": {"mark": "x"}}, {}])
def test_incomplete_rule_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Rule.model_validate(data)
