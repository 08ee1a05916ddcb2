"""What a Chinese translation of an English abstract is worth: terminology, abbreviations, person. Each in [0, 1].

What always holds: a text that is no translation (mostly not Chinese, far too short or long, one thing again and again,
or words in a row without sentences) scores 0 everywhere, so that a list of terms earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

REVIEW_CHARACTERS = 300
"""A longer review names anything, and earns nothing."""
_FIRST_PERSON = re.compile(r"我们|我的|我(?!国)|(?<![A-Za-z])(?:we|our)(?![A-Za-z])", re.IGNORECASE)
_IMPERSONAL = re.compile(r"本文|本研究|该研究|研究表明|结果表明|作者")


@dataclass(frozen=True)
class Scores:
    terminology: float
    """Share of the glossary's terms that are translated as the field does."""
    abbreviations: float
    """Share that are written out in Chinese with the abbreviation in brackets at their first use."""
    person: float
    """1 when the first person is gone and the abstract speaks of the paper or the study instead."""


def scores_of(text: str, abstract: Mapping[str, Any]) -> Scores:
    if not is_translation(text, abstract["text"]):
        return Scores(0.0, 0.0, 0.0)
    return Scores(terminology(text, abstract), abbreviations(text, abstract), person(text))


def terminology(text: str, abstract: Mapping[str, Any]) -> float:
    return _share(term in text for term in abstract["terms"].values())


def abbreviations(text: str, abstract: Mapping[str, Any]) -> float:
    return _share(_written_out(text, short, long) for short, long in abstract["abbreviations"].items())


def person(text: str) -> float:
    return float(not _FIRST_PERSON.search(text) and bool(_IMPERSONAL.search(text)))


def is_translation(text: str, original: str) -> bool:
    chinese = re.findall(r"[\u4e00-\u9fff]", text)
    latin = re.findall(r"[A-Za-z]", text)
    pairs = [a + b for a, b in pairwise(chinese)]
    sentences = [part for part in re.split(r"[。！？]", text) if len(part.strip()) >= 6]
    return (
        len(chinese) > 2 * len(latin)
        and 0.15 * len(original) <= len(chinese) <= 0.9 * len(original)
        and len(set(pairs)) > 0.6 * len(pairs)
        and len(sentences) >= max(1, original.count(". ") + original.endswith(".") - 1)
    )


def rewards_of(draft: str, review: str, final: str, abstract: Mapping[str, Any]) -> dict[str, float]:
    """Role → reward. The translator (agents 1 and 3) for the text that comes out, the reviewer (agent 2) for terms.

    The reviewer earns half for the terms that are right in the draft or named in its review, half for those in the
    final text: so what it writes must be right, and be taken up.
    """
    final_scores = scores_of(final, abstract)
    named = terminology(f"{draft}\n{review}", abstract) if 0 < len(review.strip()) <= REVIEW_CHARACTERS else 0.0
    return {
        "translator": (final_scores.terminology + final_scores.abbreviations + final_scores.person) / 3,
        "reviewer": (named * is_translation(draft, abstract["text"]) + final_scores.terminology) / 2,
    }


def _written_out(text: str, short: str, long: str) -> bool:
    """ "数字高程模型（DEM）", and nowhere the abbreviation before it."""
    in_brackets = rf"[（(]\s*(?:[A-Za-z ]+[,，]\s*)?{re.escape(short)}s?\s*[）)]"
    found = re.search(rf"{re.escape(long)}\s*{in_brackets}", text)
    return found is not None and short not in re.findall(r"[A-Za-z]+", text[: found.start()])


def _share(held: Any) -> float:
    results = list(held)
    return sum(results) / len(results) if results else 1.0
