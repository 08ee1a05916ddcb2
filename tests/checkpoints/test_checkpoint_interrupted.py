"""A save that dies or finds no space, at whatever point, leaves the checkpoint before it as it was."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from swarmtune.trainer import checkpoint
from swarmtune.trainer.trainer import Trainer

Make = Callable[..., tuple[Trainer, Path]]
FILES = 12
KILLS = 25

SAVER = f"""
import sys
from pathlib import Path
from swarmtune.trainer import checkpoint

def fill(folder):
    for n in range({FILES}):
        (folder / str(n)).write_text(str(generation) * 4096)

place = Path(sys.argv[1])
generation = int(sys.argv[2])
while True:
    generation += 1
    checkpoint.write(place, {{"step": generation}}, fill, needed_bytes=0)
    print(generation, flush=True)
"""


def generation_of(place: Path) -> int:
    """Of the checkpoint that a reader finds; every file must be of it."""
    generation = checkpoint.read(place)["step"]
    for n in range(FILES):
        assert (place / str(n)).read_text() == str(generation) * 4096
    return generation


def test_a_saver_killed_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path):
    place, draw, seen = tmp_path / "step-000001", random.Random(3), 0
    checkpoint.write(
        place, {"step": 0}, lambda f: [(f / str(n)).write_text("0" * 4096) for n in range(FILES)], needed_bytes=0
    )
    core = str(Path(__file__).parents[2] / "core")
    for _ in range(KILLS):
        saver = subprocess.Popen(
            [sys.executable, "-S", "-c", SAVER, str(place), str(seen)],
            env=os.environ | {"PYTHONPATH": core},
            stdout=subprocess.PIPE,
        )
        assert saver.stdout is not None and int(saver.stdout.readline()) == seen + 1
        time.sleep(draw.random() * 0.05)  # a moment of the save, drawn: no condition names it
        saver.kill()
        saver.wait()
        saver.stdout.close()
        found = generation_of(place)
        assert found > seen
        seen = found


@pytest.mark.parametrize("act", ["mkdir", "write_text", "fsync", "rename"])
@pytest.mark.parametrize("nth", [1, 2, 9])
def test_no_space_at_any_point_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, nth: int
):
    place = tmp_path / "step-000001"

    def fill(folder: Path) -> None:
        (folder / "part").mkdir()
        for n in range(FILES):
            (folder / "part" / str(n)).write_text("x")

    checkpoint.write(place, {"step": 1}, fill, needed_bytes=0)
    where = os if act == "fsync" else Path
    real, calls = getattr(where, act), 0

    def failing(*args: object, **keys: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(where, act, failing)
        try:
            checkpoint.write(place, {"step": 2}, fill, needed_bytes=0)
            assert calls < nth, "the error was swallowed"
        except OSError as error:
            assert error.errno == errno.ENOSPC
    assert checkpoint.read(place)["step"] in ({1} if calls >= nth else {2})
    assert sorted(p.name for p in (place / "part").iterdir()) == sorted(str(n) for n in range(FILES))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The kernel refuses to write a file beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_the_tensors_is_an_oserror_and_the_previous_one_loads(trained: Make):
    trainer, run = trained()
    place = run / "checkpoints" / "step-000001"
    trainer.save(place)
    model, optimizer = (next(place.glob(f"{kind}_world*")).stat().st_size for kind in ("model", "optim"))
    assert model < optimizer
    before = {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()}
    for limit in (model // 2, (model + optimizer) // 2):
        with files_no_larger_than(limit), pytest.raises(OSError, match=r"disk|space|large"):
            trainer.save(place)
        assert {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()} == before
        assert [p.name for p in place.parent.iterdir()] == ["step-000001"]
    weights = {name: value.clone() for name, value in trainer.weights()}
    trainer.save(place)
    again, _ = trained()
    again.start(place)
    assert all(torch.equal(value, weights[name]) for name, value in again.weights())
