"""What `a3r client check` plays besides its own stub policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def good_answer(task: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> str:
    """Thanks, the matter, one sentence."""
    words = [word.strip(".,!?") for word in task["matter"].split()]
    return f"Thank you for telling us about the {max(words, key=len)}, we will see to it today."
