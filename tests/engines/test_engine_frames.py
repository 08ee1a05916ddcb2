"""What goes into a frame comes out of it."""

import asyncio
import errno

import pytest

from swarmtune.backend import BackendError, ContextOverflow
from swarmtune.engines import frames
from swarmtune.types import (
    FinishedEpisode,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Sample,
    SamplingParams,
    TrainBatch,
)


async def carry(frame: frames.Frame) -> frames.Frame | None:
    reader = asyncio.StreamReader()
    reader.feed_data(frames.pack(frame))
    reader.feed_eof()
    return await frames.read_frame(reader)


async def test_a_request_survives_the_journey():
    request = GenerateRequest(
        "r", [1, 2], SamplingParams(max_tokens=3, stop=("a", "ü"), stop_token_ids=(5,), seed=2**63), episode_id="e"
    )
    assert frames.read_request(await carry(frames.request_fields(request))) == request


async def test_a_chunk_survives_the_journey():
    chunk = GenerateChunk([1, 2], [-0.5, -0.25], 3, FinishReason.STOP, "END", [{1: -0.5}, {2: -0.25}])
    carried = await carry({"chunks": [frames.chunk_fields(9, chunk)]})
    assert frames.read_chunk(carried["chunks"][0]) == (9, chunk)


async def test_a_batch_survives_the_journey():
    sample = Sample("s", "e", "t", [1, 2], [0, 1], [0.0, -1.0], [-1, 0], context_exact=[1, 1], call_ids=["c"])
    batch = TrainBatch(4, [FinishedEpisode("e", "t", 0.5, [sample], {"exact": 1.0}, client="me", weight_version=3)])
    assert frames.read_batch(await carry(frames.batch_fields(batch))) == batch


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ContextOverflow("too long"), ContextOverflow, "too long"),
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left"),
        (KeyError("who knows"), BackendError, "KeyError: 'who knows'"),
    ],
)
async def test_an_error_is_raised_as_what_it_was(error, kind, text):
    read = frames.read_error(await carry(frames.error_fields(error)))
    assert type(read) is kind
    assert text in str(read)
    assert getattr(read, "errno", None) == getattr(error, "errno", None)


async def test_a_connection_that_ends_within_a_frame_reads_as_closed():
    reader = asyncio.StreamReader()
    reader.feed_data(frames.pack({"id": 1})[:-1])
    reader.feed_eof()
    assert await frames.read_frame(reader) is None


async def test_bytes_that_are_no_frame_are_an_error():
    reader = asyncio.StreamReader()
    reader.feed_data(b"\x00\x00\x00\x01\xc1")
    with pytest.raises(frames.FrameError):
        await frames.read_frame(reader)
