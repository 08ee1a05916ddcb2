"""Frames between the server and the engine process: a length, then one msgpack map. No torch, no process, no policy.

A call is `{"id", "op", …}` and is answered by one `{"id", "ok": …}` or `{"id", "error": {…}}`. A generation is answered
by its chunks, which travel together, one frame `{"chunks": [[id, …], …]}` per decode step, and ends with the chunk that
has a finish reason, or with an error. Frames of different calls interleave; within one they keep their order.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import msgpack

from swarmtune.backend import (
    BackendError,
    ContextOverflow,
    GenerateFailed,
    RequestRefused,
    StartFailed,
    UpdateFailed,
)
from swarmtune.types import (
    FinishedEpisode,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Sample,
    SamplingParams,
    TrainBatch,
)

Frame = dict[str, Any]

_LENGTH = struct.Struct("!I")

_ERRORS: dict[str, type[BackendError]] = {
    kind.__name__: kind for kind in (StartFailed, RequestRefused, ContextOverflow, GenerateFailed, UpdateFailed)
}


class FrameError(ValueError):
    """Bytes or fields that are no frame of ours."""


def pack(frame: Mapping[str, Any]) -> bytes:
    body: bytes = msgpack.packb(frame, use_bin_type=True)  # pyright: ignore[reportAssignmentType] - the stub says optional
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has closed, also in the middle of a frame.

    Raises:
        FrameError: the stream cannot be read any further.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        frame = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except ValueError as error:
        raise FrameError(f"not a msgpack frame: {error}") from error
    if not isinstance(frame, dict):
        raise FrameError("a frame is a map")
    return frame


def request_fields(request: GenerateRequest) -> Frame:
    return {
        "request_id": request.request_id,
        "prompt": array("i", request.prompt_token_ids).tobytes(),
        "sampling": _shallow(request.sampling),
        "episode_id": request.episode_id,
        "lane": request.lane,
    }


def read_request(fields: Mapping[str, Any]) -> GenerateRequest:
    sampling = dict(fields["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    prompt = array("i", fields["prompt"]).tolist()
    return GenerateRequest(
        fields["request_id"],
        prompt,
        SamplingParams(**sampling),
        episode_id=fields["episode_id"],
        lane=fields["lane"],
    )


def chunk_fields(call_id: int, chunk: GenerateChunk) -> list[Any]:
    return [
        call_id,
        chunk.token_ids,
        chunk.logprobs,
        chunk.weight_version,
        chunk.finish_reason,
        chunk.stop_string,
        chunk.top_logprobs,
    ]


def read_chunk(fields: list[Any]) -> tuple[int, GenerateChunk]:
    """(call id, chunk)."""
    call_id, token_ids, logprobs, version, reason, stop_string, top = fields
    finish = None if reason is None else FinishReason(reason)
    return call_id, GenerateChunk(token_ids, logprobs, version, finish, stop_string, top)


def batch_fields(batch: TrainBatch) -> Frame:
    episodes = []
    for episode in batch.episodes:
        episodes.append(_shallow(episode) | {"samples": [_shallow(sample) for sample in episode.samples]})
    return {"step": batch.step, "episodes": episodes, "supervised_lr": batch.supervised_lr}


def read_batch(fields: Mapping[str, Any]) -> TrainBatch:
    episodes = [
        FinishedEpisode(**{**episode, "samples": [Sample(**sample) for sample in episode["samples"]]})
        for episode in fields["episodes"]
    ]
    return TrainBatch(step=fields["step"], episodes=episodes, supervised_lr=fields["supervised_lr"])


def error_fields(error: BaseException) -> Frame:
    """What the other side needs to raise the same thing."""
    if isinstance(error, OSError):
        return {"kind": "OSError", "message": error.strerror or str(error), "errno": error.errno}
    return {"kind": type(error).__name__, "message": str(error)}


def read_error(fields: Mapping[str, Any]) -> Exception:
    """The exception of an error frame; a kind that is not ours becomes a BackendError that names it."""
    kind, message = fields["kind"], fields["message"]
    if kind == "OSError":
        return OSError(fields.get("errno"), message)
    if kind in _ERRORS:
        return _ERRORS[kind](message)
    return BackendError(f"{kind}: {message}")


def _shallow(value: Any) -> Frame:
    """A dataclass as a map of its own fields. `asdict` would copy every token of every list one by one."""
    return {field.name: getattr(value, field.name) for field in dataclass_fields(value)}
