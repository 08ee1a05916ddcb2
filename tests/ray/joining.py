"""Joins a Ray cluster as a trainer and prints one line of JSON: `joining.py train|crowd ADDRESS MODEL WORK`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))

from trainer_episodes import make_batch

from swarmtune.config import ConfigError, TrainConfig
from swarmtune.trainer.trainer import HalfUpdated, Trainer


class Raises:
    """A loss function that fails on one rank only; the other would wait for it in a collective."""

    def __call__(self, model_output, data, dp_group=None):
        import torch

        if torch.distributed.get_rank() == 1:
            raise ValueError("this rank has had enough")
        return model_output["log_probs"].values().sum() * 0.0, {}


def train(trainer: Trainer) -> dict:
    """An update, one that a rank spoils, and what is said to another one."""
    said = {"grad_norm": trainer.update(make_batch(step=1))["actor/grad_norm"]}
    trainer._model.set_loss_fn(Raises())
    for name in ("raised", "after"):
        try:
            trainer.update(make_batch(step=2))
        except HalfUpdated as error:
            said[name] = str(error)
    return said


def main() -> None:
    what, address, model, work = sys.argv[1:]
    keys = {"model": "tiny", "trainer.dtype": "fp32", "optim.lr": 1e-3, "optim.grad_clip": 1e9, "engine.threads": 2}
    spread = {"ray.address": address, "ray.processes": 2 if what == "train" else 5}
    trainer = Trainer(TrainConfig.from_dict(keys | spread), Path(model), work_dir=Path(work))
    try:
        trainer.start()
    except ConfigError as error:
        said = {"refused": str(error)}
    else:
        said = train(trainer)
    trainer.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
