"""What this engine calls of veRL 0.9.1, by signature: an upgrade that changes one of them is noticed here."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import verl
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, TrainingWorkerConfig
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker, TinkerTrainingWorker
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

CALLED: dict[Any, tuple[str, ...]] = {
    LLMServerClient.__init__: ("config", "load_balancer_handle"),
    LLMServerClient.generate: ("request_id", "prompt_ids", "sampling_params"),
    LLMServerClient._acquire_server: ("request_id",),
    LLMServerClient._vllm_request_id: ("request_id",),
    LLMServerManager.__init__: ("config", "worker_group"),
    LLMServerManager.get_client: ("client_cls",),
    LLMServerManager.get_replicas: (),
    CheckpointEngineManager.__init__: ("config", "actor_wg", "replicas"),
    CheckpointEngineManager.update_weights: ("global_steps",),
    CheckpointEngineManager.sleep_replicas: (),
    CheckpointEngineManager.abort_replicas: (),
    CheckpointEngineManager.resume_generation_replicas: (),
    RolloutReplica.sleep: (),
    RolloutReplica.abort_all_requests: (),
    RolloutReplica.resume_generation: (),
    RayResourcePool.__init__: ("process_on_nodes", "use_gpu", "max_colocate_count"),
    RayClassWithInitArgs.__init__: ("cls",),
    RayWorkerGroup.__init__: ("resource_pool", "ray_cls_with_init"),
    RayWorkerGroup.execute_all_async: ("method_name",),
    TinkerActorRolloutRefWorker.__init__: ("config", "role"),
    TinkerActorRolloutRefWorker.init_model: (),
    TinkerActorRolloutRefWorker.update_weights: ("global_steps", "mode"),
    TinkerTrainingWorker.__init__: ("config",),
    TinkerTrainingWorker.reset: (),
    TinkerTrainingWorker.forward_backward: ("data",),
    TinkerTrainingWorker.infer_batch: ("data",),
    TinkerTrainingWorker.optimizer_step: ("optim_step_params",),
    TrainingWorkerConfig: ("model_type", "model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    CheckpointEngineConfig: ("backend",),
}


def test_verl_is_the_version_this_was_written_for():
    assert version("verl") == "0.9.1"


@pytest.mark.parametrize("called", CALLED, ids=lambda c: getattr(c, "__qualname__", str(c)))
def test_what_is_called_takes_what_it_is_given(called: Any):
    parameters = inspect.signature(called).parameters
    assert set(CALLED[called]) <= set(parameters)
    takes = {"self", *CALLED[called]}
    needed = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    assert needed <= takes


def test_an_answer_has_the_fields_that_are_read():
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(TokenOutput.model_fields)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("generate", {"prompt_ids", "sampling_params", "request_id"}),
        ("abort_request", {"request_id", "reset_prefix_cache"}),
    ],
)
def test_the_vllm_server_actor_has_the_methods_that_are_called(method: str, parameters: set[str]):
    """By its source: vLLM, which it imports, is not needed here."""
    path = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/vllm_async_server.py"
    (server,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "vLLMHttpServer"
    ]
    (found,) = [n for n in server.body if isinstance(n, ast.AsyncFunctionDef) and n.name == method]
    assert parameters <= {argument.arg for argument in found.args.args}


def test_answers_carry_the_step_of_their_weights():
    for name in ("vllm_rollout/vllm_async_server.py", "sglang_rollout/async_sglang_server.py"):
        source = (Path(verl.__file__).parent / "workers/rollout" / name).read_text()
        assert '"global_steps": self.global_steps' in source, name
