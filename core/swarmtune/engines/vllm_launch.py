"""Starts vLLM's own server in vLLM's own interpreter: `PYTHON vllm_launch.py [--parent PID] VLLM_ARGUMENTS`.

Runs where swarmtune is not installed, so it needs the standard library and vLLM alone. It adds two things:

- Every process of it dies with the one that started it, also on `kill -9`. vLLM's processes are spawned, and a spawned
  process runs this file again as `__mp_main__`.
- The logprob of a sampled token is log softmax(logits / temperature) of the whole distribution, before top_p, top_k and
  a grammar cut it: the quantity a trainer computes. vLLM offers it before temperature or after the cuts, not between.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
SPAWNER = "SWARMTUNE_VLLM_SPAWNER"
"""In the environment of a spawned process: who spawned it, so that it can tell whether that one is still there."""


def leave_import_path() -> None:
    """This folder has modules named like installed ones; it is not to be searched."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]


def die_with_parent(parent: int) -> None:
    """Be killed by the kernel when the thread that started this process ends; leave if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    os.environ[SPAWNER] = str(os.getpid())


def offer_to_the_oom_killer() -> None:
    """When memory is short the kernel should take vLLM, which is restarted, before the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("700")
    except OSError:
        pass


def report_whole_distribution() -> None:
    """Exchange vLLM's sampler and grammar mask for ones that remember the logits before they are cut.

    Must come before vLLM's model runner is imported: it takes both by name.
    """
    import torch
    from vllm.v1.sample import sampler  # pyright: ignore[reportMissingImports] - in vLLM's interpreter alone
    from vllm.v1.structured_output import utils  # pyright: ignore[reportMissingImports] - the same

    plain_sampler, mask = sampler.Sampler, utils.apply_grammar_bitmask
    unmasked: list[torch.Tensor] = []
    """(R, V) logits of the present step, when a grammar cut some of them."""

    def apply_grammar_bitmask(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: Any) -> None:
        unmasked[:] = [logits.clone()]
        mask(scheduler_output, grammar_output, input_batch, logits)

    class WholeDistributionSampler(plain_sampler):
        """vLLM's sampler, whose raw logprobs know the temperature."""

        _whole: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """(R, V) logits and (R,) temperatures while a step is sampled."""

        def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            self._whole = (unmasked.pop() if unmasked else logits, sampling_metadata.temperature)
            try:
                return super().forward(logits, sampling_metadata, *args, **kwargs)
            finally:
                self._whole = None

        def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
            if self._whole is None:
                return plain_sampler.compute_logprobs(logits)
            whole_R_V, temperature_R = self._whole
            if temperature_R is not None:
                counted_R = torch.where(temperature_R < sampler._SAMPLING_EPS, 1.0, temperature_R)
                whole_R_V = whole_R_V.float() / counted_R.unsqueeze(1)
            return whole_R_V.log_softmax(dim=-1, dtype=torch.float32)

    utils.apply_grammar_bitmask = apply_grammar_bitmask
    sampler.Sampler = WholeDistributionSampler


def take_parent(arguments: list[str]) -> int | None:
    """Remove `--parent PID` from the front of the arguments and return the pid."""
    if arguments[1:2] != ["--parent"]:
        return None
    parent = int(arguments[2])
    del arguments[1:3]
    return parent


def main() -> None:
    # vLLM's second model runner has a sampler of its own, and a forked process would not run this file.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm.entrypoints.launchers.api_server.entry import main as serve  # pyright: ignore[reportMissingImports]

    serve()


if __name__ == "__main__":
    leave_import_path()
    if (started_by := take_parent(sys.argv)) is not None:
        die_with_parent(started_by)
        offer_to_the_oom_killer()
    main()
elif __name__ == "__mp_main__":
    leave_import_path()
    if SPAWNER in os.environ:
        die_with_parent(int(os.environ[SPAWNER]))
    report_whole_distribution()
