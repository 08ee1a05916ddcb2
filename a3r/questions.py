"""Questions put to a model, in the journal: asked once, answered once, replayed after a restart.

The question is durable before it is sent and the answer before it is used. A leader that dies in between asks once
more; nothing else repeats a question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from a3r.leader import Ask
from a3r.ledger import Ledger
from a3r.store import Put, Store


class StoreJournal:
    """`a3r.leader.Journal` on a campaign's journal; debits the tokens an answer says it used."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self.store = store
        self.ledger = ledger

    def ask(self, key: str, request: Mapping[str, Any], call: Ask) -> dict[str, Any]:
        """The stored answer to `key`, or `call(request)`, stored before it is returned."""
        row = self.store.row("llm", key)
        if row is not None and "answer" in row:
            return row["answer"]
        asked = {"request": dict(request), "times": (row or {}).get("times", 0) + 1}
        self.store.commit("LLM_ASKED", [Put("llm", key, asked)], data={"key": key, "times": asked["times"]})
        answer = call(request)
        usage = answer.get("usage") or {}
        tokens = int(usage.get("total_tokens") or 0)
        stored = Put("llm", key, asked | {"answer": answer})
        spent = self.ledger.spend_tokens(key, tokens, float(usage.get("usd") or 0.0))
        self.store.commit("LLM_ANSWERED", [stored, spent], data={"key": key, "tokens": tokens})
        return answer
