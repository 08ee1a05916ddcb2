"""The real 135 M-parameter model in fp32: the batch says what plain transformers says to one request at a time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmtune import models
from swarmtune.config import TrainConfig
from swarmtune.engines.hf import HFEngine
from swarmtune.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

QUESTIONS = ["What is 3 + 4?", "Name a colour.", "Write one short sentence about a fox and a hen.", "Say yes."]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder() -> Path:
    return models.resolve("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for q in QUESTIONS
    ]


@pytest.fixture(scope="module")
def answers(folder, prompts):
    """(tokens, logprobs) per prompt: three at once, the last joins when the first has spoken."""
    config = TrainConfig.from_dict({"model": "smollm2-135m", "trainer.dtype": "fp32"})
    with ThreadPoolExecutor(1) as torch_thread:
        batch = HFEngine.load(config, folder, torch_thread, work_dir=folder)._batch
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    said: dict[str, tuple[list[int], list[float]]] = {str(i): ([], []) for i in range(len(prompts))}
    for i, prompt in enumerate(prompts[:-1]):
        batch.submit(GenerateRequest(str(i), prompt, sampling))
    steps = 0
    while batch.has_work:
        for name, chunk in batch.step():
            assert not isinstance(chunk, Exception)
            said[name][0].extend(chunk.token_ids)
            said[name][1].extend(chunk.logprobs)
        steps += 1
        if steps == 5:
            batch.submit(GenerateRequest(str(len(prompts) - 1), prompts[-1], sampling))
    return [said[str(i)] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_greedy_tokens_equal_those_of_generate(plain, prompts, answers):
    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        out = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == out[0, len(prompt) :].tolist()


def test_logprobs_equal_those_of_a_full_forward_pass(plain, prompts, answers):
    for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        full = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert logprobs == pytest.approx(full.tolist(), abs=1e-4)
