"""One training of two steps through the engine process, claim by claim; see scripts/gpu_check.sh.

python scripts/lib/gpu_check.py                  engine verl on one GPU
python scripts/lib/gpu_check.py --engine hf      the same claims of the embedded engine, without a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NEEDED = {"torch": "a CUDA build", "verl": "0.9.1", "vllm": "0.24 for --rollout vllm", "sglang": "for --rollout sglang"}
"""Packages, and which version of them engine verl was written for."""
TASKS, REPEATS, ANSWER = 2, 4, 32
CLOSE = {"bf16": 0.05, "fp32": 1e-3}
"""How far the mean log-probability of a sampled token may differ between engine and trainer."""


class Report:
    """Lines as they come, and what they add up to."""

    def __init__(self) -> None:
        self.failed = self.passed = 0
        self._began = time.monotonic()

    def check(self, claim: str, holds: bool, told: str) -> None:
        self.passed += holds
        self.failed += not holds
        self._say("PASS" if holds else "FAIL", f"{claim}: {told}")

    def skip(self, claim: str, reason: str) -> None:
        self._say("SKIP", f"{claim}: {reason}")

    def note(self, text: str) -> None:
        self._say("    ", text)

    def _say(self, word: str, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {word}  {text}", flush=True)


def versions(report: Report) -> None:
    for name, wanted in NEEDED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        report.note(f"{name} {found} (wanted: {wanted})")


def gpu_missing() -> str | None:
    """Why there is no GPU to check with."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; scripts/gpu_check.sh --install makes an environment that has it"
    import torch

    if torch.cuda.is_available():
        return None
    build = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", a build without CUDA")
    return f"{build} sees no GPU; run this on a machine with an NVIDIA GPU and a CUDA build of torch"


def gpu_memory() -> str:
    """Of the first GPU, by its driver."""
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def check_losses_on_gpu(report: Report) -> None:
    """What is left to check without veRL's replicas: log-probabilities and their gradient on the GPU."""
    import torch

    from swarmtune.trainer.layout import token_logprobs

    torch.manual_seed(0)
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(64, 1000, generator=generator).to(device).requires_grad_()
        labels = torch.randint(0, 1000, (64,), generator=generator).to(device)
        values, _ = token_logprobs(logits, labels, torch.ones(64, device=device), entropy_grad=True)
        values.sum().backward()
        assert logits.grad is not None
        results.append((values.detach().cpu(), logits.grad.cpu()))
    worst = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    report.check("log-probabilities on the GPU equal the CPU's", worst < 1e-4, f"largest difference {worst:.2g}")


def random_model(folder: Path) -> Path:
    """A Llama of 25 M parameters with random weights and the catalogue's built-in tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from swarmtune import models

    tiny = models.resolve("tiny")
    config: Any = LlamaConfig.from_pretrained(tiny)
    config.update({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8})
    config.update({"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in tiny.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(path, folder)
    return folder


def configuration(options: argparse.Namespace, model: Path) -> Any:
    from swarmtune.config import TrainConfig

    keys = {
        "model": str(model),
        "batch_tasks": TASKS,
        "repeats": REPEATS,
        "optim.lr": 1e-4,
        "sampling.max_tokens": ANSWER,
        "engine.context_length": 512,
        "engine.max_batch": 32,
        "engine.kind": options.engine,
        "trainer.dtype": options.dtype,
        "engine.verl.rollout": options.rollout,
    }
    return TrainConfig.from_dict(keys)


async def answers(backend: Any, prompts: list[list[int]], **sampling: Any) -> list[tuple[list[int], list[float], int]]:
    """Tokens, logprobs and last weight version of each prompt, generated together."""
    from swarmtune.types import GenerateRequest, SamplingParams

    async def one(number: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        params = SamplingParams(**({"max_tokens": ANSWER, "seed": number} | sampling))
        tokens, logprobs, seen = [], [], -1
        request = GenerateRequest(f"r{time.monotonic_ns()}-{number}", prompt, params, episode_id=f"e{number}")
        async for chunk in backend.generate(request):
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            seen = chunk.weight_version
        return tokens, logprobs, seen

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))


def batch_of(step: int, prompts: list[list[int]], found: list[tuple[list[int], list[float], int]]) -> Any:
    """Every other answer is a good one."""
    from swarmtune.types import FinishedEpisode, Sample, TrainBatch

    episodes = []
    for number, (prompt, (tokens, logprobs, seen)) in enumerate(zip(prompts, found, strict=True)):
        name, task = f"s{step}e{number}", f"t{number % TASKS}"
        sample = Sample(
            sample_id=name,
            episode_id=name,
            task_id=task,
            token_ids=prompt + tokens,
            loss_mask=[0] * len(prompt) + [1] * len(tokens),
            logprobs=[0.0] * len(prompt) + logprobs,
            weight_versions=[-1] * len(prompt) + [seen] * len(tokens),
        )
        episodes.append(FinishedEpisode(name, task, reward=float(number // TASKS % 2), samples=[sample]))
    return TrainBatch(step=step, episodes=episodes)


@contextlib.asynccontextmanager
async def running(report: Report, backend: Any, config: Any, work: Path, resume: Path | None) -> AsyncIterator[Any]:
    """A started backend, stopped at the end, with the check that nothing of it is left."""
    began = time.monotonic()
    info = await backend.start(config, work_dir=work, resume=resume)
    report.note(f"{info.parameters / 1e6:.1f} M parameters, GPU memory {gpu_memory()}")
    report.check("the engine starts", True, f"{time.monotonic() - began:.1f} s, weight version {info.weight_version}")
    children = list(processes_below(backend.pid))
    try:
        yield info
    finally:
        began = time.monotonic()
        await backend.stop(grace_s=60.0)
        left = await asyncio.to_thread(still_running, children, 90.0)
        took = time.monotonic() - began
        report.check("stopping leaves no process", not left, f"{took:.1f} s, of {len(children)} processes left: {left}")


def processes_below(pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += below


def still_running(pids: list[int], patience_s: float) -> list[int]:
    """Those of the processes that do not end within the patience."""
    deadline = time.monotonic() + patience_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def check_engine(report: Report, options: argparse.Namespace, work: Path) -> None:
    from swarmtune.engines.process import ProcessBackend

    model = Path(options.model) if options.model else random_model(work / "model")
    config, backend = configuration(options, model), ProcessBackend()
    prompts = [[5 + n % TASKS, 6, 7, 8] for n in range(TASKS * REPEATS)]
    saved = work / "saved"
    async with running(report, backend, config, work, None):
        greedy = await answers(backend, prompts[:1], temperature=0.0, max_tokens=4)
        for step in (1, 2):
            began = time.monotonic()
            found = await answers(backend, prompts)
            took = time.monotonic() - began
            whole = all(tokens and len(tokens) == len(logprobs) for tokens, logprobs, _ in found)
            told = f"{sum(len(t) for t, _, _ in found)} tokens in {took:.2f} s"
            report.check(f"step {step}: answers have a logprob per token", whole, told)
            seen = sorted({v for *_, v in found})
            report.check(f"step {step}: answers name their weights", seen == [step - 1], f"versions {seen}")
            began = time.monotonic()
            result = await backend.train(batch_of(step, prompts, found))
            check_step(report, step, result, options.dtype, time.monotonic() - began)
        after = await answers(backend, prompts[:1], temperature=0.0, max_tokens=4)
        report.check(
            "the engine has the new weights",
            greedy[0][:2] != after[0][:2],
            f"greedy logprobs {greedy[0][1][:2]} → {after[0][1][:2]}",
        )
        await backend.save(saved)
    async with running(report, backend, config, work, saved) as info:
        report.check("a checkpoint brings its step back", info.weight_version == 2, f"version {info.weight_version}")
        again = await answers(backend, prompts[:1], temperature=0.0, max_tokens=4)
        apart = max((abs(a - b) for a, b in zip(after[0][1], again[0][1], strict=False)), default=9.9)
        report.check("and its weights", apart < CLOSE[options.dtype], f"greedy logprobs differ by {apart:.2g}")


def check_step(report: Report, step: int, result: Any, dtype: str, took: float) -> None:
    metrics = result.metrics
    norm, apart = metrics.get("actor/grad_norm", 0.0), metrics.get("training/rollout_logprobs_diff_mean", 9.9)
    report.check(
        f"step {step}: an update", norm > 0 and result.weight_version == step, f"{took:.1f} s, norm {norm:.3g}"
    )
    report.check(f"step {step}: engine and trainer agree", apart < CLOSE[dtype], f"mean difference {apart:.2g}")
    share = metrics.get("s/weight_sync", 0.0)
    report.note(f"update {metrics.get('s/update', 0):.2f} s, weight sync {share:.2f} s, GPU memory {gpu_memory()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["verl", "hf"], default="verl")
    parser.add_argument("--rollout", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--dtype", choices=list(CLOSE), default="bf16")
    parser.add_argument("--model", help="a local Hugging Face folder; a random model by default")
    options = parser.parse_args()
    report = Report()
    versions(report)
    if options.engine == "verl":
        if (reason := gpu_missing()) is not None:
            report.skip("everything", reason)
            return 2
        check_losses_on_gpu(report)
        missing = [name for name in ("verl", options.rollout) if importlib.util.find_spec(name) is None]
        if missing:
            told = f"{', '.join(missing)} not installed; scripts/gpu_check.sh --install makes an environment with them"
            report.skip("engine verl", told)
            return 1
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        try:
            asyncio.run(check_engine(report, options, Path(scratch)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the report says so
            report.check("no error", False, f"{type(error).__name__}: {error}")
            log = Path(scratch) / "engine.log"
            print(log.read_text(errors="replace")[-4000:] if log.exists() else "no engine log", file=sys.stderr)
    report.note(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    sys.exit(main())
