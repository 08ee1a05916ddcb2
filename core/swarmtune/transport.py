"""Requests of a client to its server: JSON in, wire model out, refusals as typed errors.

A request that got no answer (connection refused or lost, server restarting, a proxy's 502) is sent again with growing
pauses until `patience_s` has passed without one; every route of the protocol is safe to repeat. A refusal that says
`retry_after_s` is passed on: whether waiting makes sense is the caller's to know. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from swarmtune.errors import ServerUnreachable, SwarmError, error_of
from swarmtune.protocol import Code, ErrorBody, Event

T = TypeVar("T")

ANSWER_S = 60.0
"""How long an answer may take beyond the time the request itself asks the server to wait."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_NO_ANSWER = frozenset({502, 504})


class Transport:
    def __init__(self, url: str, *, api_key: str | None, patience_s: float) -> None:
        """`patience_s`: how long a server may be away before ServerUnreachable is raised.

        Raises:
            ValueError: `url` is no address that could ever answer.
        """
        self.url = checked_url(url)
        self.patience_s = patience_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def get(self, path: str, answer: type[T], *, wait_s: float = 0.0, **query: Any) -> T:
        """`wait_s` is sent along where not 0: a long poll."""
        params = {k: v for k, v in query.items() if v is not None} | ({"wait_s": wait_s} if wait_s else {})
        return await self._send("GET", path, answer, params=params, wait_s=wait_s)

    async def post(
        self,
        path: str,
        answer: type[T],
        body: BaseModel | None = None,
        *,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> T:
        return await self._send("POST", path, answer, body=body, wait_s=wait_s, patience_s=patience_s)

    async def delete(self, path: str, *, patience_s: float | None = None) -> None:
        await self._send("DELETE", path, dict, patience_s=patience_s)

    async def events(self, after: int) -> AsyncIterator[Event]:
        """The event stream from `after` on; reconnects where it left off."""
        last_answer = time.monotonic()
        for pause_s in _pauses():
            try:
                async with self._client().stream(
                    "GET", "/v1/events", params={"after": after}, timeout=httpx.Timeout(ANSWER_S)
                ) as response:
                    if response.status_code in _NO_ANSWER:
                        raise httpx.RemoteProtocolError(f"HTTP {response.status_code}")
                    if response.is_error:
                        await response.aread()
                        raise _refusal(response)
                    async for line in response.aiter_lines():
                        last_answer = time.monotonic()
                        if line.startswith("data:"):
                            event = Event.model_validate_json(line.removeprefix("data:"))
                            after = event.seq
                            yield event
            except httpx.TransportError as error:
                self._check_patience(last_answer, self.patience_s, error)
            await asyncio.sleep(pause_s)

    async def _send(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        params: Mapping[str, Any] | None = None,
        body: BaseModel | None = None,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> T:
        # Not httpx's own encoder: it refuses NaN, which the server must see to say what is wrong with it.
        content = json.dumps(body.model_dump()) if body else None
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body else {})
        began = time.monotonic()
        for pause_s in _pauses():
            try:
                response = await self._client().request(
                    method,
                    path,
                    params=params,
                    content=content,
                    headers=headers,
                    timeout=httpx.Timeout(ANSWER_S + wait_s, connect=10.0),
                )
                if response.status_code not in _NO_ANSWER:
                    return _read(response, answer)
                error: Exception = httpx.RemoteProtocolError(f"HTTP {response.status_code}")
            except httpx.TransportError as lost:
                error = lost
            self._check_patience(began, self.patience_s if patience_s is None else patience_s, error)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            # A proxy of the environment can never reach this machine's loopback.
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                trust_env=not _is_loopback(self.url),
                limits=httpx.Limits(max_connections=512, max_keepalive_connections=64),
            )
        return self._http

    def _check_patience(self, since: float, patience_s: float, error: Exception) -> None:
        away_s = time.monotonic() - since
        if away_s >= patience_s:
            raise ServerUnreachable(
                f"no swarm server answers at {self.url} ({type(error).__name__}: {error}), tried for {away_s:.0f} s; "
                "is `swarmtune serve` running there?"
            ) from error


def checked_url(url: str) -> str:
    """A server's address without a slash at its end.

    Raises:
        ValueError: it has no scheme or no host.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r}: {error}; give a server's address, such as http://127.0.0.1:10086") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"{url!r}: give a server's address with its scheme, such as http://127.0.0.1:10086")
    return url.rstrip("/")


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.7, _LONGEST_PAUSE_S)


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _adapter(answer: Any) -> TypeAdapter[Any]:
    return TypeAdapter(answer)


def _read(response: httpx.Response, answer: type[T]) -> T:
    if response.is_error:
        raise _refusal(response)
    try:
        return _adapter(answer).validate_json(response.content)
    except ValidationError as error:
        raise SwarmError(
            f"{response.url} answered something else than this client knows; are both of one version? {error}",
            status=response.status_code,
        ) from error


def _refusal(response: httpx.Response) -> SwarmError:
    try:
        return error_of(ErrorBody.model_validate(response.json()["error"]), response.status_code)
    except (ValueError, KeyError, TypeError):
        code = Code.NOT_FOUND if response.status_code == 404 else None
        return SwarmError(
            f"{response.request.method} {response.url} answered HTTP {response.status_code}: {response.text[:300]}",
            code=code,
            status=response.status_code,
        )
