"""The trainer drives the ranks of a veRL cluster: here one rank of this process, computing on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_episodes import VOCABULARY, make_batch
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl_actors import Recorded

from swarmtune.config import TrainConfig
from swarmtune.engines import verl_cluster
from swarmtune.trainer.rank_worker import RankModel
from swarmtune.trainer.trainer import HalfUpdated, Trainer
from swarmtune.trainer.worker import WORLD_OF_ONE, Sizes, ensure_process_group, environment, worker_config

Make = Callable[..., TrainConfig]


class CpuRank:
    """What VerlRank does, with the trainer's own CPU worker in place of veRL's actor and rollout."""

    def __init__(self, config: TrainConfig, model_path: Path) -> None:
        self._config, self._path = config, model_path
        self._models: dict[str, RankModel] = {}

    def build(self, seed: int) -> tuple[Any, Sizes]:
        return self.load("policy", worker_config(self._config, self._path, trained=True), seed)

    def load(self, name: str, config: Any, seed: int) -> tuple[Any, Sizes]:
        torch.manual_seed(seed)
        ensure_process_group()
        with environment(WORLD_OF_ONE):
            worker = TinkerTrainingWorker(config)
            worker.reset()
        self._models[name] = model = RankModel(worker, first=True)
        return model.hf_config, model.sizes

    def unload(self, name: str) -> None:
        self._models.pop(name, None)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        return getattr(self._models[name], method)(*arguments)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape)).save_pretrained(path)
    return path


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, settings: Any, model_path: Path) -> Iterator[Callable[..., Recorded]]:
    def make(config: TrainConfig) -> Recorded:
        recorded = Recorded(config, settings, rank=CpuRank(config, model_path))
        monkeypatch.setattr(verl_cluster, "_cluster", recorded.cluster)
        return recorded

    yield make


@pytest.mark.parametrize("keys", [{}, {"algorithm.kl_coef": 0.2}, {"lora.rank": 4}], ids=["plain", "kl", "lora"])
def test_the_cluster_trains_what_the_process_trains(
    config: Make, cluster: Callable[..., Recorded], model_path: Path, tmp_path: Path, keys: dict
):
    recorded = cluster(config(**keys))
    on_ranks = Trainer(config(**keys), model_path, work_dir=tmp_path)
    alone = Trainer(config(**{"engine.kind": "hf"} | keys), model_path, work_dir=tmp_path)
    for trainer in (on_ranks, alone):
        trainer.start()
    got, expected = on_ranks.update(make_batch()), alone.update(make_batch())
    assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    ours, theirs = ({n: value.clone() for n, value in t.weights()} for t in (on_ranks, alone))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert recorded.calls[0] == ("rank", "build", 0)
    for trainer in (on_ranks, alone):
        trainer.close()


def test_a_rank_that_fails_breaks_the_update_for_good(
    config: Make, cluster: Callable[..., Recorded], model_path: Path, tmp_path: Path
):
    from ray.exceptions import RaySystemError

    recorded = cluster(config())
    trainer = Trainer(config(), model_path, work_dir=tmp_path)
    trainer.start()
    recorded.group.fails = RaySystemError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(HalfUpdated, match="illegal memory access"):
        trainer.update(make_batch())
    recorded.group.fails = None
    with pytest.raises(HalfUpdated, match="last checkpoint"):
        trainer.update(make_batch())
