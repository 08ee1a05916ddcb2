"""A stand-in for an LLM judge, so that the example runs without one: an endpoint that grades by rules.

    python examples/judge_reward/rule_judge.py --port 9100      # task.judge_url=http://127.0.0.1:9100/v1

It speaks OpenAI's chat dialect, reads question and answer out of the prompt of judge.py, and gives points for thanks or
an apology, for length and for form; nothing for what does not name the matter or only says the question again.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_POLITE = re.compile(r"\b(thank|sorry|apolog)", re.IGNORECASE)


def points(question: str, answer: str) -> tuple[int, str]:
    """Score from 0 to 10, and why. Only what names the matter in words of its own is worth anything: one thanks for all
    customers, or the question once more, would be learned otherwise."""
    words, asked = answer.split(), {_bare(word) for word in question.split()}
    said = {_bare(word) for word in words}
    if said <= asked:
        return 0, "words of the question only"
    matter = {bare for word in question.rpartition(":")[2].split() if len(bare := _bare(word)) >= 5}
    matter = {word for word in matter if not _POLITE.search(word)}
    if matter and not said & matter:
        return 0, "does not name the matter"
    found = {
        "thanks or an apology": 5 * bool(_POLITE.search(answer)),
        "5 to 30 words": 3 * (5 <= len(words) <= 30),
        "one whole sentence": 2 * bool(re.fullmatch(r"[^.!?]+[.!?]", answer.strip())),
    }
    return sum(found.values()), ", ".join(name for name, given in found.items() if given) or "nothing of what is asked"


def _bare(word: str) -> str:
    return word.strip(".,!?:'\"").lower()


class RuleJudge(ThreadingHTTPServer):
    """Serves from a thread of its own while its block runs."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked = 0
        """Requests so far."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), name="rule judge", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, prompt: str) -> tuple[int, str]:
        """HTTP status and text; tests put other judges here."""
        asked, said = (re.search(rf"<{part}>\n(.*?)\n</{part}>", prompt, re.DOTALL) for part in ("question", "answer"))
        score, reason = points(asked[1] if asked else "", said[1] if said else "")
        return 200, json.dumps({"score": score, "reason": reason})


class _Handler(BaseHTTPRequestHandler):
    server: RuleJudge  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        status, text = self.server.answer(body["messages"][-1]["content"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        reply: dict[str, Any] = {"error": {"message": text}}
        if status == 200:
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "rules", "choices": [choice]}
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: every verdict is in the judge's cache."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Grades answers by rules, as an OpenAI-compatible endpoint.")
    parser.add_argument("--port", type=int, default=9100)
    server = RuleJudge(parser.parse_args().port)
    print(server.url, flush=True)
    server.serve_forever()
