"""A static OpenAI-compatible endpoint: the house player behind POST /v1/chat/completions, on a free port.

    with StaticEndpoint() as endpoint: ... endpoint.url ...
    python static_endpoint.py --port 8123

It stands where the paper has a large static model. It never learns and needs no key.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import house

Reply = Callable[[Sequence[dict[str, str]]], str]


class StaticEndpoint:
    """Serves `reply` until the block is left."""

    def __init__(self, reply: Reply = house.reply, port: int = 0) -> None:
        self._server = _Server(("127.0.0.1", port), _handler(reply))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="static endpoint", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _handler(reply: Reply) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                said = reply(json.loads(body)["messages"])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self._send(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
                return
            self._send(200, completion(said))

        def _send(self, status: int, data: dict[str, Any]) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: a line per call would bury the training's own."""

    return Handler


def completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-static",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "house",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serves the house player.")
    parser.add_argument("--port", type=int, default=8123)
    with StaticEndpoint(port=parser.parse_args().port) as running:
        print(running.url)
        threading.Event().wait()
