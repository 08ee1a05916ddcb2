"""Strict YAML: a trap is refused with line and fix, what is written is read back the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3r.formats import to_yaml
from a3r.strictyaml import FormatError, load_strict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1e-7", 1e-7),
        ("a: 5e6", 5e6),
        ("a: 1.0e-7", 1e-7),
        ("a: -3", -3),
        ("a: true", True),
        ("a: null", None),
        ("a:", None),
        ("a: '12:30'", "12:30"),
        ('a: "yes"', "yes"),
        ("a: 2026-01-02", "2026-01-02"),
        ("a: 0", 0),
        ("a: 0.5", 0.5),
        ("a: |\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_values_are_what_they_look_like(text: str, expected: object) -> None:
    value = load_strict(text).data["a"]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: yes", 2, "write true or false"),
        ("a: on", 1, "boolean"),
        ("a: 12:30", 1, "base 60"),
        ("a: 010", 1, "leading zero"),
        ("a: 0x1F", 1, "decimal"),
        ("a: 1_000", 1, "underscore"),
        ("a: .nan", 1, "finite"),
        ("a: 1e999", 1, "finite"),
        ("a: True", 1, "lower case"),
        ("a: 1\nb:\n  c: 1\n  c: 2", 4, "given twice (first on line 3)"),
        ("a: [1, 2", 1, "not valid YAML"),
        ("a: &x {b: 1}\nc:\n  <<: *x", 3, "merge keys"),
        ("a: !!python/object:os.system x", 1, "not read"),
        ("a: &x [*x]", 1, "alias"),
        ("? [1, 2]\n: 3", 1, "a key must be a word"),
        ("\ta: 1", 1, "not valid YAML"),
    ],
)
def test_trap_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(FormatError) as found:
        load_strict(text, "f.yaml")
    assert f"f.yaml:{line}" in str(found.value)
    assert words in str(found.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(FormatError) as found:
        load_strict("a: yes\nb: 010\nc: 12:30")
    assert len(found.value.problems) == 3


def test_lines_of_nested_keys_are_known() -> None:
    document = load_strict("a:\n  b:\n    - x\n    - y: 1\n", "f", first_line=10)
    assert document.where(("a", "b", 1, "y")) == "f:13"
    assert document.where(("a", "b", 1, "missing")) == "f:13"
    assert document.where(("z",)) == "f:10"


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
    | st.sampled_from(["yes", "off", "010", "1_0", "12:30", "1e5", "0x1", "null", "True", "~", "", "-", "1e-7", ".inf"])
)
DATA = st.dictionaries(
    st.text("abcxyz_.-", min_size=1, max_size=6),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner)
    ),
    max_size=4,
)


@given(DATA)
def test_what_is_written_is_read_back_the_same(data: dict[str, object]) -> None:
    assert same(load_strict(to_yaml(data)).data or {}, data)


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=0)
    return type(a) is type(b) and a == b
