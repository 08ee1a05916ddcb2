"""The real vLLM loads an export and says what transformers says: the merged model, and the adapter on its base."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_parts import saved
from transformers import AutoModelForCausalLM

from swarmtune.backend import StartFailed
from swarmtune.engines.vllm_server import find_interpreter
from swarmtune.trainer.export import export
from swarmtune.trainer.trainer import Trainer

try:
    INTERPRETER = find_interpreter(None)
except StartFailed as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [1, 2, 3, 4, 50, 60]
TOKENS = 8
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    model, adapter, prompt, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    lora = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
    llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2, **lora)
    answer = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1),
        lora_request=LoRARequest("exported", 1, adapter) if adapter else None,
    )[0].outputs[0]
    ids = list(answer.token_ids)
    told = {"ids": ids, "logprobs": [step[token].logprob for step, token in zip(answer.logprobs, ids)]}
    print("ANSWER " + json.dumps(told))
"""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def ask_vllm(folder: Path, *, model: Path, adapter: Path | None = None) -> dict[str, list[float]]:
    (folder / "ask.py").write_text(PROGRAM)
    words = [str(model), str(adapter or ""), json.dumps(PROMPT), str(TOKENS)]
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [INTERPRETER, str(folder / "ask.py"), *words],
        env=inherited | ENVIRONMENT, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("ANSWER "))


def ask_transformers(folder: Path) -> dict[str, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, logprobs = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(TOKENS):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return {"ids": ids[len(PROMPT) :], "logprobs": logprobs}


def test_vllm_answers_with_an_exported_model_and_adapter_as_transformers_does(
    trained: Callable[..., tuple[Trainer, Path]], tiny_llama: Path, tmp_path: Path
):
    trainer, run = trained(**{"lora.rank": 4})
    checkpoint = saved(trainer, run)
    export(checkpoint, tmp_path / "merged")
    export(checkpoint, tmp_path / "adapter", adapter=True)
    expected = ask_transformers(tmp_path / "merged")
    assert ask_transformers(tiny_llama)["logprobs"] != pytest.approx(expected["logprobs"], abs=1e-3)
    merged = ask_vllm(tmp_path, model=tmp_path / "merged")
    applied = ask_vllm(tmp_path, model=tiny_llama, adapter=tmp_path / "adapter")
    for told in (merged, applied):
        assert told["ids"] == expected["ids"]
        assert told["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
