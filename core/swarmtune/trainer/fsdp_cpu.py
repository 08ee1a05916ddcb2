"""veRL's FSDP engines (policy and value model) for a CPU, computing only what the loss reads.

Promise: the same log-probabilities and values as veRL's engines, for the tokens under the loss mask; 0 elsewhere. Three
savings, none of which changes a result beyond rounding:

- the head is applied to the positions that predict a sampled token, not to every position: on a small model with a
  large vocabulary the head is a quarter of the work and most of the memory;
- rows are padded on the right and attention is causal, so no token sees padding and no mask is built;
- rows that share a prompt are laid out as one sequence, prompt once, behind a block mask (`layout`).

Importing this module resolves veRL's platform: `cpu_platform.activate` imports it at the right moment.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from swarmtune.trainer.layout import layout, sum_of_squares, token_logprobs


class SelectiveFSDPEngine(FSDPEngineWithLMHead):
    """Rows must begin with a token that is not under the loss mask, and each holds at least one that is.

    Reads from a micro-batch: input_ids and loss_mask (nested, R rows), temperature ((R,) or a number), and optionally
    bundle and shared ((R,) each, see `layout`).
    """

    module: Any
    """The model; veRL sets it while initializing."""
    _selected: torch.Tensor
    """(N,) flat positions of the pass under way that the head is applied to."""

    def initialize(self) -> None:
        super().initialize()
        self._head().register_forward_pre_hook(self._keep_selected)

    def _head(self) -> torch.nn.Module:
        return self.module.get_output_embeddings()

    def _keep_selected(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(B, L, H) → (1, N, H): the head sees only the positions that predict a token of the loss."""
        del module
        hidden = args[0]
        return (hidden.reshape(1, -1, hidden.shape[-1]).index_select(1, self._selected), *args[1:])

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        ids: Any = micro_batch["input_ids"]  # nested tensors: their values() and offsets() are not in torch's stubs
        mask: Any = micro_batch["loss_mask"]
        tokens, offsets, flat_mask = ids.values(), ids.offsets(), mask.values()
        rows = len(offsets) - 1
        plan = layout(
            tokens,
            offsets,
            micro_batch["bundle"].tolist() if "bundle" in micro_batch else list(range(rows)),
            micro_batch["shared"].tolist() if "shared" in micro_batch else [0] * rows,
        )
        targets = flat_mask.nonzero()[:, 0]
        temperature = micro_batch["temperature"]
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.float().repeat_interleave(offsets.diff())[targets]
        else:
            temperature = torch.full((len(targets),), float(temperature))
        self._selected = plan.slots[targets - 1]
        inputs: dict[str, Any] = {"input_ids": plan.input_ids, "attention_mask": plan.attention_mask}
        if plan.position_ids is not None:
            inputs["position_ids"] = plan.position_ids
        return inputs, {"targets": targets, "labels": tokens[targets], "temperature": temperature}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Nested (R, T) log_probs and entropy; entry t belongs to token t + 1, as veRL has it.

        And sum_pi_squared, where the micro-batch asks for it with `calculate_sum_pi_squared`.
        """
        del logits_processor_func
        targets = output_args["targets"]
        logits = output.logits
        if logits.shape[:2] != (1, len(targets)):
            raise RuntimeError(f"the model's logits {tuple(logits.shape)} do not come from its output embeddings")
        entropy_grad = bool(tu.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False))
        temperature = output_args["temperature"]
        logprobs, entropy = token_logprobs(logits[0], output_args["labels"], temperature, entropy_grad=entropy_grad)
        found = {"log_probs": logprobs, "entropy": entropy}
        if tu.get_non_tensor_data(micro_batch, key="calculate_sum_pi_squared", default=False):
            found["sum_pi_squared"] = sum_of_squares(logits[0], temperature)
        return {name: _in_place(value, targets, micro_batch) for name, value in found.items()}


class SelectiveValueEngine(SelectiveFSDPEngine):
    """The same for a value model: one number per token that is predicted, of the state before it."""

    model_config: Any
    engine_config: Any

    def _build_module(self) -> torch.nn.Module:
        """veRL's loader asks for flash attention, which no CPU has."""
        from transformers import AutoModelForTokenClassification

        config = self.model_config.hf_config
        # As veRL sets them: one label, and no dropout between the last hidden state and the head.
        config.num_labels, config.classifier_dropout = 1, 0.0
        module = AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path,
            dtype=PrecisionType.to_dtype(self.engine_config.model_dtype),
            config=config,
            attn_implementation="sdpa",
        )
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _head(self) -> torch.nn.Module:
        return self.module.score

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Nested (R, T) values; entry t is that of the state before token t + 1."""
        del logits_processor_func
        return {"values": _in_place(output.logits[0, :, 0].float(), output_args["targets"], micro_batch)}


def _in_place(values: torch.Tensor, targets: torch.Tensor, micro_batch: TensorDict) -> torch.Tensor:
    """(N,) values of the predicted tokens → nested (R, T), each one place before its token, 0 elsewhere."""
    ids: Any = micro_batch["input_ids"]
    offsets = ids.offsets()
    flat = torch.zeros(int(offsets[-1])).index_put((targets - 1,), values)
    return torch.nested.nested_tensor_from_jagged(flat, offsets)
