"""Plays rollout.py of the working folder with two scripted roles."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from json import dumps, loads
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar

sys.path.insert(0, str(Path.cwd()))

from rollout import rollout


class Model(BaseHTTPRequestHandler):
    """Answers a chat call with what the key's role says."""

    says: ClassVar[dict[str, str]] = {}
    heard: ClassVar[dict[str, str]] = {}

    def do_POST(self) -> None:
        key = self.headers["Authorization"].removeprefix("Bearer ")
        asked = loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard[key] = asked["messages"][-1]["content"]
        message = {"role": "assistant", "content": self.says[key]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = dumps({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", 0), Model)
Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
episode = {
    role: SimpleNamespace(base_url=url, anthropic_base_url=url, api_key=role, model="swarm", seed=1)
    for role in ("seller", "buyer")
}


def number(value: object) -> float:
    return float(value[0] if isinstance(value, tuple) else value)


for offer, answer, seller, buyer in (
    ("I want 30 coins.", "Deal!", 0.3, 0.7),
    ("I want 250.", "deal", 1.0, 0.0),
    ("A lot.", "DEAL", 0.0, 1.0),
    ("I want 30.", "No.", 0.0, 0.0),
):
    Model.says = {"seller": offer, "buyer": answer}
    found = rollout({"task_id": "lamp", "item": "lamp"}, episode)
    assert set(found) == {"seller", "buyer"}, found
    assert abs(number(found["seller"]) - seller) < 1e-9 and abs(number(found["buyer"]) - buyer) < 1e-9, (
        offer,
        answer,
        found,
    )
    assert offer in Model.heard["buyer"], "the buyer was not shown the seller's answer"
print("good")
