"""One rank of engine verl: veRL's actor and rollout worker, with the calls that our trainer makes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker, TinkerTrainingWorker

from swarmtune.engines.verl_cluster import POLICY
from swarmtune.trainer.rank_worker import RankModel
from swarmtune.trainer.worker import Sizes


class GpuModel(RankModel):
    """On GPUs veRL's own engine computes; it gives the entropy only when asked."""

    def forward_backward(self, micros: list[TensorDict]) -> list[TensorDict]:
        for micro in micros:
            tu.assign_non_tensor(micro, calculate_entropy=True)
        return super().forward_backward(micros)


class VerlRank(TinkerActorRolloutRefWorker):
    """A Ray actor; reference and critic are loaded beside the policy, into the same process."""

    def __init__(self, config: Any, role: str) -> None:
        super().__init__(config, role)
        self._models: dict[str, GpuModel] = {}

    def build(self, seed: int) -> tuple[Any, Sizes]:
        """Load the policy, and the rollout where this rank has one; the Hugging Face configuration and sizes."""
        torch.manual_seed(seed)
        self.init_model()
        assert isinstance(self.actor, TinkerTrainingWorker)
        self._models[POLICY] = model = GpuModel(self.actor, first=self.rank == 0)
        return model.hf_config, model.sizes

    def load(self, name: str, config: Any, seed: int) -> tuple[Any, Sizes]:
        """As `RankWorker.load`."""
        torch.manual_seed(seed)
        worker = TinkerTrainingWorker(config)
        worker.reset()
        self._models[name] = model = GpuModel(worker, first=self.rank == 0)
        return model.hf_config, model.sizes

    def unload(self, name: str) -> None:
        if name != POLICY:
            self._models.pop(name, None)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """A method of RankModel."""
        return getattr(self._models[name], method)(*arguments)
