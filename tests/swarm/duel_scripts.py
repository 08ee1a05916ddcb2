"""What the models say in the duel's test: white some number, black mostly one more than it hears."""

from __future__ import annotations

import re
from collections.abc import Sequence


def play(messages: Sequence[dict[str, str]], index: int) -> str:
    heard = re.search(r"named (\d)", messages[-1]["content"])
    if heard:
        return f"{min(9, int(heard[1]) + 1)}" if index % 4 else "I will not say"
    return f"My number is {1 + index % 9}"
