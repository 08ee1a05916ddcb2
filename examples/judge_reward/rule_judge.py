"""A stand-in for an LLM judge, so that the example runs without one: an endpoint that grades by rules.

    python examples/judge_reward/rule_judge.py --port 9100      # task.judge_url=http://127.0.0.1:9100/v1

It speaks OpenAI's chat dialect, reads the answer out of the prompt of judge.py, and gives points for thanks or an
apology, for length and for form.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


def points(answer: str) -> tuple[int, str]:
    """Score from 0 to 10, and why."""
    words = answer.split()
    found = {
        "thanks or an apology": 5 * bool(re.search(r"\b(thank|sorry|apolog)", answer, re.IGNORECASE)),
        "5 to 30 words": 3 * (5 <= len(words) <= 30),
        "one whole sentence": 2 * bool(re.fullmatch(r"[^.!?]+[.!?]", answer.strip())),
    }
    return sum(found.values()), ", ".join(name for name, given in found.items() if given) or "nothing of what is asked"


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
        found = re.search(r"<answer>\n(.*?)\n</answer>", prompt, re.DOTALL)
        score, reason = points(found[1] if found else "")
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
