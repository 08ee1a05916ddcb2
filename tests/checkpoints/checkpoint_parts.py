"""What the checkpoint tests share: steps of a scripted training, and a batch for the real trainer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmtune.checkpoints import folder_of
from swarmtune.testing import LocalServer
from swarmtune.types import FinishedEpisode, Sample, TrainBatch

if TYPE_CHECKING:
    from swarmtune.trainer.trainer import Trainer


async def step(local: LocalServer, rewards: tuple[float, float] = (0.0, 1.0), task: str = "task") -> int:
    """One step of a training with batch_tasks 1 and repeats 2; its number."""
    before = local.server.status().step
    for reward in rewards:
        await local.run_episode(task, reward)
    records = await local.server.steps_after(before, wait_s=30)
    await local.server.status_when(leaves="weight_syncing", wait_s=30)
    return records[-1].step


def steps_on_disk(run: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (run / "checkpoints").iterdir())


def trained_episodes(run: Path, number: int) -> list[str]:
    """Episodes that a scripted checkpoint's pretend weights contain."""
    return json.loads((run / "checkpoints" / f"step-{number:06d}" / "state.json").read_text())["episodes"]


def saved(trainer: Trainer, run: Path) -> Path:
    """A checkpoint of the trainer's step, in its run."""
    checkpoint = folder_of(run, trainer.step)
    trainer.save(checkpoint)
    return checkpoint


def make_batch(number: int = 1) -> TrainBatch:
    """2 tasks × 2 episodes of a few random tokens."""
    draw = random.Random(number)
    episodes = []
    for n in range(4):
        tokens = [draw.randrange(250) for _ in range(16)]
        mask = [0] * 8 + [1] * 8
        sample = Sample(
            sample_id=f"s{n}",
            episode_id=f"e{n}",
            task_id=f"t{n // 2}",
            token_ids=tokens,
            loss_mask=mask,
            logprobs=[-5.0 * m for m in mask],
            weight_versions=[0 if m else -1 for m in mask],
        )
        episodes.append(FinishedEpisode(f"e{n}", f"t{n // 2}", reward=float(n % 2), samples=[sample]))
    return TrainBatch(step=number, episodes=episodes)


def snapshot(folder: Path) -> dict[str, Any]:
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
