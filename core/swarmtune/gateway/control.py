"""Control and client routes: JSON in, JSON out, refusals as `{"error": {code, message, …}}`. docs/api.md lists them.

Reads and checks requests, asks the server, writes answers. Decides nothing about training. What changes state runs to
its end even when the client hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from swarmtune.clients import ClientError
from swarmtune.config import ConfigError
from swarmtune.episodes import EpisodeError
from swarmtune.gateway.auth import Capability, Forbidden, Keyring, Unauthorized
from swarmtune.gateway.sse import KEEP_ALIVE, open_stream
from swarmtune.journal import JournalError
from swarmtune.lane import LaneError
from swarmtune.protocol import (
    AbortRequest,
    AgreeRequest,
    ClaimRequest,
    Code,
    EndRequest,
    ErrorBody,
    EvaluationOutcome,
    EvaluationRequest,
    Event,
    ExportRequest,
    RegisterRequest,
    StartRequest,
    WarmupRequest,
)

if TYPE_CHECKING:
    from swarmtune.server import SwarmServer

log = logging.getLogger(__name__)

MAX_POLL_S = 120.0
EVENTS_IDLE_S = 5.0
MAX_COUNTER = 2**53
"""Larger than any number of a step or an event, and exact as a float."""

_EVENT_ID = re.compile(r"[0-9]{1,30}")

STATUS: dict[Code, int] = {
    Code.BAD_REQUEST: 400,
    Code.BAD_CONFIG: 400,
    Code.BAD_REWARD: 400,
    Code.UNKNOWN_MODEL: 400,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.UNKNOWN_EPISODE: 404,
    Code.UNKNOWN_CLIENT: 404,
    Code.UNKNOWN_EVALUATION: 404,
    Code.VERSION_PASSED: 409,
    Code.CONFIG_CONFLICT: 409,
    Code.NOT_STARTED: 409,
    Code.END_CONFLICT: 409,
    Code.STEP_MISMATCH: 409,
    Code.FINISHED: 409,
    Code.EPISODE_OVER: 410,
    Code.EPISODE_EXPIRED: 410,
    Code.NO_SPACE: 507,
    Code.NOT_ROLLING: 503,
    Code.TOO_MANY_EPISODES: 503,
    Code.SHARE_FULL: 503,
    Code.STOPPING: 503,
    Code.ENGINE_LOST: 503,
    Code.START_FAILED: 503,
}
"""HTTP status of each code; 500 for the rest."""

Model = TypeVar("Model", bound=BaseModel)
Answer = TypeVar("Answer")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlRefused(Exception):
    """A request the server turns down."""

    def __init__(
        self, code: Code, message: str, *, retry_after_s: float | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.body = ErrorBody(code=code, message=message, retry_after_s=retry_after_s, details=details or {})


def refusal_of(error: Exception) -> ErrorBody | None:
    """The wire form of an expected error; None for one that is our own fault."""
    match error:
        case ControlRefused():
            return error.body
        case EpisodeError():
            return ErrorBody(code=error.code, message=str(error), retry_after_s=error.retry_after_s)
        case ClientError() | LaneError():
            return ErrorBody(code=error.code, message=str(error))
        case JournalError():
            return ErrorBody(code=error.code, message=str(error), retry_after_s=10.0)
        case ConfigError():
            return ErrorBody(code=Code.BAD_CONFIG, message=str(error))
        case Unauthorized():
            return ErrorBody(code=Code.UNAUTHORIZED, message=str(error))
        case Forbidden():
            return ErrorBody(code=Code.FORBIDDEN, message=str(error))
        case _:
            return None


def error_response(body: ErrorBody, *, status: int | None = None) -> web.Response:
    """`status`: instead of the code's usual one."""
    headers = {}
    if body.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(body.retry_after_s)))
    return json_response({"error": body.model_dump(mode="json")}, status or STATUS.get(body.code, 500), headers)


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    if isinstance(payload, BaseModel):
        payload = payload.model_dump(mode="json")
    elif isinstance(payload, list):
        payload = [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in payload]
    return web.Response(body=orjson.dumps(payload), status=status, headers=headers, content_type="application/json")


def read_json(raw: bytes) -> Any:
    """A body as Python values.

    Raises:
        ControlRefused: not JSON, nested beyond reason, or with half a character that no file could hold.
    """
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(raw)
    try:
        data = json.loads(raw)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ControlRefused(
            Code.BAD_REQUEST,
            "the body has half a character (a lone surrogate such as \\ud800); replace it before sending: "
            "text.encode(errors='replace').decode()",
        ) from None
    except RecursionError:
        raise ControlRefused(
            Code.BAD_REQUEST, "the body is nested too deep; no request here needs more than a few levels"
        ) from None
    except ValueError as error:
        raise ControlRefused(Code.BAD_REQUEST, f"the body is not JSON: {error}") from None
    return data


def unreadable(error: web.RequestPayloadError) -> str:
    """What a client is told whose body is not what its headers say."""
    return f"the body cannot be read: {' '.join(str(error).split())}; send it as its Content-Encoding says, or plain"


async def read_model(request: web.Request, model: type[Model], *, empty: bool = False) -> Model:
    """The body as a wire model. NaN and Infinity are read, so that the field they stand in can be named.

    Raises:
        ControlRefused: not JSON, or not this model; names each wrong field.
    """
    raw = await request.read()
    if not raw and empty:
        return model()
    try:
        return model.model_validate(read_json(raw))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()]
        raise ControlRefused(Code.BAD_REQUEST, f"{model.__name__}: " + "; ".join(lines)) from None


def number_query(request: web.Request, name: str, default: float, *, high: float = float("inf")) -> float:
    """Raises:
    ControlRefused: not a number from 0 up.
    """
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= 0:
        raise ControlRefused(Code.BAD_REQUEST, f"{name}: must be a number from 0 up, not {text!r}")
    return min(value, high)


def counter_query(request: web.Request, name: str) -> int:
    """A number of a step or an event, 0 unless given; larger than any there will ever be is the largest there can be.

    Raises:
        ControlRefused: not a number from 0 up.
    """
    return int(number_query(request, name, 0.0, high=MAX_COUNTER))


_changes: set[asyncio.Task[Any]] = set()
"""State changes under way whose client may have hung up: the loop itself keeps only weak references."""


async def to_the_end(change: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a state change that a hang-up must not cut in two."""
    task = asyncio.ensure_future(change)
    _changes.add(task)
    task.add_done_callback(_changes.discard)
    return await asyncio.shield(task)


def is_foreign_page(request: web.Request) -> bool:
    """A browser sent it for a page that is not ours."""
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host


class ControlRoutes:
    def __init__(self, server: SwarmServer, keys: Keyring) -> None:
        self._server = server
        self._keys = keys

    def add_to(self, app: web.Application) -> None:
        observe, control = (Capability.OBSERVE,), (Capability.CONTROL,)
        runs = (Capability.ROLLOUT, Capability.EVALUATE)
        looks = (Capability.OBSERVE, *runs)
        router = app.router
        for method, path, handler, any_of in (
            ("GET", "/v1/status", self.status, looks),
            ("GET", "/v1/config", self.config, looks),
            ("GET", "/v1/pool", self.pool, looks),
            ("GET", "/v1/steps", self.steps, looks),
            ("GET", "/v1/events", self.events, looks),
            ("GET", "/v1/clients", self.clients, observe),
            ("GET", "/v1/checkpoints", self.checkpoints, observe),
            ("POST", "/v1/checkpoints", self.save_checkpoint, control),
            ("POST", "/v1/export", self.export, control),
            ("GET", "/v1/evaluations", self.evaluations, looks),
            ("POST", "/v1/evaluations", self.begin_evaluation, (Capability.EVALUATE,)),
            ("GET", "/v1/evaluations/{id}", self.evaluation, looks),
            ("POST", "/v1/evaluations/{id}/finish", self.finish_evaluation, (Capability.EVALUATE,)),
            ("POST", "/v1/warmup", self.warm_up, control),
            ("GET", "/v1/warmup/{id}", self.warmup, looks),
            ("POST", "/v1/start", self.start, control),
            ("POST", "/v1/stop", self.stop, control),
            ("POST", "/v1/shutdown", self.shutdown, control),
            ("POST", "/v1/episodes", self.claim, runs),
            ("GET", "/v1/episodes/{id}", self.episode, looks),
            ("GET", "/v1/episodes/{id}/merge", self.merge_report, looks),
            ("POST", "/v1/episodes/{id}/heartbeat", self.heartbeat, runs),
            ("POST", "/v1/episodes/{id}/end", self.end, runs),
            ("POST", "/v1/episodes/{id}/abort", self.abort, runs),
            ("POST", "/v1/clients", self.register, (Capability.ROLLOUT,)),
            ("DELETE", "/v1/clients/{name}", self.leave, (Capability.ROLLOUT,)),
            ("POST", "/v1/clients/{name}/heartbeat", self.client_heartbeat, (Capability.ROLLOUT,)),
            ("POST", "/v1/clients/{name}/agree", self.agree, (Capability.ROLLOUT,)),
        ):
            router.add_route(method, path, self._guarded(handler, any_of))

    def _guarded(self, handler: Handler, any_of: tuple[Capability, ...]) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                if is_foreign_page(request):
                    raise Forbidden("a page of another site may not use this server")
                self._keys.require(request.headers, *any_of)
                return await handler(request)
            except web.HTTPRequestEntityTooLarge as error:
                return error_response(ErrorBody(code=Code.BAD_REQUEST, message=f"{error.text} Send less"), status=413)
            except web.RequestPayloadError as error:
                return error_response(ErrorBody(code=Code.BAD_REQUEST, message=unreadable(error)))
            except web.HTTPException:
                raise
            except Exception as error:
                body = refusal_of(error)
                if body is None:
                    log.exception("control route failed", extra={"path": request.path})
                    body = ErrorBody(
                        code=Code.INTERNAL, message=f"{type(error).__name__}: {error}; see the server's log"
                    )
                return error_response(body)

        return guarded

    # -- the server

    async def status(self, request: web.Request) -> web.Response:
        """`?while=booting&wait_s=30` returns once the state is another one, or at the limit."""
        wait_s = number_query(request, "wait_s", 0.0, high=MAX_POLL_S)
        return json_response(await self._server.status_when(leaves=request.query.get("while"), wait_s=wait_s))

    async def config(self, request: web.Request) -> web.Response:
        return json_response(self._server.config())

    async def pool(self, request: web.Request) -> web.Response:
        """`?after=3&wait_s=30` returns once a step later than 3 is being collected, or at the limit."""
        after, wait_s = counter_query(request, "after"), number_query(request, "wait_s", 0.0, high=MAX_POLL_S)
        return json_response(await self._server.pool_when(after=after, wait_s=wait_s))

    async def start(self, request: web.Request) -> web.Response:
        body = await read_model(request, StartRequest)
        if body.from_run is not None and body.from_step is None:
            raise ControlRefused(Code.BAD_REQUEST, "from_run: needs from_step, the checkpoint to begin at")
        starting = self._server.start(body.config, from_step=body.from_step, from_run=body.from_run)
        return json_response(await to_the_end(starting))

    async def stop(self, request: web.Request) -> web.Response:
        return json_response(await to_the_end(self._server.stop()))

    async def shutdown(self, request: web.Request) -> web.Response:
        self._server.request_shutdown()
        return json_response({})

    async def steps(self, request: web.Request) -> web.Response:
        after = counter_query(request, "after")
        wait_s = number_query(request, "wait_s", 0.0, high=MAX_POLL_S)
        return json_response(await self._server.steps_after(after, wait_s=wait_s))

    async def warm_up(self, request: web.Request) -> web.Response:
        body = await read_model(request, WarmupRequest)
        return json_response(await to_the_end(self._server.warm_up(body)))

    async def warmup(self, request: web.Request) -> web.Response:
        """`?after=n&wait_s=30` returns once more than n of its steps are done, or at the limit."""
        after = counter_query(request, "after")
        wait_s = number_query(request, "wait_s", 0.0, high=MAX_POLL_S)
        view = await self._server.warmup_when(request.match_info["id"], after=after, wait_s=wait_s)
        return json_response(view)

    async def checkpoints(self, request: web.Request) -> web.Response:
        return json_response(self._server.checkpoints())

    async def save_checkpoint(self, request: web.Request) -> web.Response:
        return json_response(await to_the_end(self._server.save_checkpoint()))

    async def export(self, request: web.Request) -> web.Response:
        body = await read_model(request, ExportRequest)
        if not body.path.startswith("/"):
            raise ControlRefused(Code.BAD_REQUEST, "path: must be absolute; it is a folder on the server's machine")
        return json_response(await to_the_end(self._server.export(body)))

    # -- evaluations

    async def evaluations(self, request: web.Request) -> web.Response:
        return json_response(self._server.evaluations(request.query.get("name")))

    async def begin_evaluation(self, request: web.Request) -> web.Response:
        body = await read_model(request, EvaluationRequest)
        return json_response(await to_the_end(self._server.begin_evaluation(body)))

    async def evaluation(self, request: web.Request) -> web.Response:
        return json_response(self._server.evaluation(request.match_info["id"]))

    async def finish_evaluation(self, request: web.Request) -> web.Response:
        body = await read_model(request, EvaluationOutcome)
        return json_response(await to_the_end(self._server.finish_evaluation(request.match_info["id"], body)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events; with `Accept: application/json` the events so far as a list."""
        last = request.headers.get("Last-Event-ID", "")
        after = min(int(last), MAX_COUNTER) if _EVENT_ID.fullmatch(last) else counter_query(request, "after")
        if "application/json" in request.headers.get("Accept", ""):
            return json_response(list(await self._server.events.after(after)))
        response = await open_stream(request)
        try:
            async for events in self._server.events.follow(after, idle_s=EVENTS_IDLE_S):
                await response.write(b"".join(map(event_bytes, events)) or KEEP_ALIVE)
                if self._server.closing.is_set():
                    break
        except ConnectionResetError:
            log.debug("event listener gone")
        return response

    # -- episodes

    async def claim(self, request: web.Request) -> web.Response:
        body = await read_model(request, ClaimRequest)
        self._keys.require(request.headers, Capability(_CAPABILITY_OF[body.kind]))
        return json_response(await self._server.claim(body, origin=f"{request.scheme}://{request.host}"))

    async def episode(self, request: web.Request) -> web.Response:
        return json_response(self._server.episode_view(request.match_info["id"]))

    async def merge_report(self, request: web.Request) -> web.Response:
        return json_response(self._server.merge_report(request.match_info["id"]))

    async def heartbeat(self, request: web.Request) -> web.Response:
        return json_response(self._server.heartbeat(request.match_info["id"]))

    async def end(self, request: web.Request) -> web.Response:
        body = await read_model(request, EndRequest)
        return json_response(await to_the_end(self._server.end(request.match_info["id"], body)))

    async def abort(self, request: web.Request) -> web.Response:
        body = await read_model(request, AbortRequest, empty=True)
        return json_response(await to_the_end(self._server.abort(request.match_info["id"], body.reason)))

    # -- clients

    async def clients(self, request: web.Request) -> web.Response:
        return json_response(list(self._server.client_views()))

    async def register(self, request: web.Request) -> web.Response:
        body = await read_model(request, RegisterRequest)
        return json_response(await to_the_end(self._server.register(body)))

    async def leave(self, request: web.Request) -> web.Response:
        await to_the_end(self._server.leave(request.match_info["name"]))
        return json_response({})

    async def client_heartbeat(self, request: web.Request) -> web.Response:
        return json_response(self._server.client_heartbeat(request.match_info["name"]))

    async def agree(self, request: web.Request) -> web.Response:
        body = await read_model(request, AgreeRequest)
        return json_response(self._server.agree(request.match_info["name"], body.step))


_CAPABILITY_OF = {"train": "rollout", "evaluate": "evaluate"}


def event_bytes(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), orjson.dumps(event.model_dump()))
