"""The rolling batch against plain transformers, in fp32: same tokens, same logprobs, whoever else is in the batch."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from swarmtune.backend import ContextOverflow, RequestRefused
from swarmtune.engines.hf import eos_token_ids, load_model
from swarmtune.engines.rolling import RollingBatch
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, SamplingParams

CONTEXT = 256
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def make_batch(folder: Path, *, max_batch: int = 16, seed: int = 0) -> RollingBatch:
    model = load_model(folder, torch.float32, context_length=CONTEXT)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return RollingBatch(
        model,
        max_batch=max_batch,
        context_length=CONTEXT,
        decode=lambda ids: tokenizer.decode(ids),
        eos_token_ids=eos_token_ids(model),
        seed=seed,
    )


def ask(request_id: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, sampling)


def prompts(count: int, *, seed: int = 1, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randint(1, longest))] for _ in range(count)]


class Answers:
    """Drives a batch and gathers what it emits, by request id."""

    def __init__(self, batch: RollingBatch) -> None:
        self.batch = batch
        self.chunks: dict[str, list[GenerateChunk]] = {}
        self.errors: dict[str, Exception] = {}

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for request_id, item in self.batch.step():
                if isinstance(item, Exception):
                    self.errors[request_id] = item
                else:
                    self.chunks.setdefault(request_id, []).append(item)

    def run(self) -> "Answers":
        while self.batch.has_work:
            self.step()
        return self

    def tokens(self, request_id: str) -> list[int]:
        return [t for c in self.chunks[request_id] for t in c.token_ids]

    def logprobs(self, request_id: str) -> list[float]:
        return [p for c in self.chunks[request_id] for p in c.logprobs]

    def last(self, request_id: str) -> GenerateChunk:
        return self.chunks[request_id][-1]


def answers(folder: Path, requests: list[GenerateRequest], **settings) -> Answers:
    batch = make_batch(folder, **settings)
    for request in requests:
        batch.submit(request)
    return Answers(batch).run()


@pytest.fixture(scope="module")
def plain(model_folder):
    """The same model as transformers runs it, fp32, its own attention."""
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def plain_greedy(model, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def full_pass_logprobs(model, context: list[int], prompt_length: int, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, prompt_length - 1 : -1].float()
    chosen = torch.tensor(context[prompt_length:])
    return torch.log_softmax(logits / temperature, -1).gather(1, chosen[:, None])[:, 0].tolist()


def test_batched_greedy_equals_single_request_generate(model_folder, plain):
    texts = prompts(9)
    got = answers(model_folder, [ask(str(i), p) for i, p in enumerate(texts)])
    assert [got.tokens(str(i)) for i in range(9)] == [plain_greedy(plain, p, 12) for p in texts]
    assert len({tuple(got.tokens(str(i))) for i in range(9)}) == 9, "equal answers would prove nothing"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_a_full_forward_pass(model_folder, plain, temperature):
    sampling = SamplingParams(max_tokens=20, temperature=temperature, top_p=0.9, top_k=40, seed=3, ignore_eos=True)
    texts = prompts(6)
    got = answers(model_folder, [ask(str(i), p, sampling) for i, p in enumerate(texts)])
    for i, prompt in enumerate(texts):
        expected = full_pass_logprobs(plain, prompt + got.tokens(str(i)), len(prompt), temperature)
        assert got.logprobs(str(i)) == pytest.approx(expected, abs=1e-4)


def test_greedy_logprobs_count_as_temperature_one(model_folder, plain):
    prompt = prompts(1)[0]
    got = answers(model_folder, [ask("a", prompt)])
    expected = full_pass_logprobs(plain, prompt + got.tokens("a"), len(prompt), 1.0)
    assert got.logprobs("a") == pytest.approx(expected, abs=1e-4)


def test_joining_and_leaving_midway_does_not_change_the_others(model_folder, plain):
    texts = prompts(8, seed=5)
    lengths = [30, 3, 17, 1, 9, 22, 2, 14]
    batch = make_batch(model_folder, max_batch=4)
    run = Answers(batch)
    for i, (prompt, length) in enumerate(zip(texts, lengths, strict=True)):
        batch.submit(ask(str(i), prompt, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)))
        run.step(i % 3)
    run.run()
    assert [run.tokens(str(i)) for i in range(8)] == [
        plain_greedy(plain, p, n) for p, n in zip(texts, lengths, strict=True)
    ]


def test_repeats_of_a_prompt_are_computed_once_and_answer_alike(tiny_folder):
    batch = make_batch(tiny_folder)
    widths = spy_on_forward(batch)
    prompt = prompts(1, seed=9)[0]
    for i in range(6):
        batch.submit(ask(str(i), prompt))
    run = Answers(batch).run()
    assert widths[0] == (1, len(prompt)), "six repeats, one row prefilled"
    assert len({tuple(run.tokens(str(i))) for i in range(6)}) == 1


def test_next_turn_computes_only_what_is_new(model_folder, plain):
    batch = make_batch(model_folder)
    run = Answers(batch)
    first = prompts(1, seed=11, longest=60)[0] + list(range(30))
    batch.submit(ask("turn 1", first))
    run.run()
    widths = spy_on_forward(batch)
    second = first + run.tokens("turn 1") + [65, 66, 67]
    batch.submit(ask("turn 2", second))
    run.run()
    assert widths[0] == (1, 4), "three new tokens and the one whose keys were never computed"
    assert run.tokens("turn 2") == plain_greedy(plain, second, 12)


def test_late_repeat_copies_from_the_running_one(model_folder, plain):
    batch = make_batch(model_folder)
    run = Answers(batch)
    prompt = list(range(50, 90))
    batch.submit(ask("early", prompt))
    run.step(5)
    widths = spy_on_forward(batch)
    batch.submit(ask("late", prompt))
    run.run()
    assert widths[0] == (1, 1)
    assert run.tokens("late") == run.tokens("early") == plain_greedy(plain, prompt, 12)


def test_prompts_beyond_the_prefill_budget_take_several_passes(model_folder, plain, monkeypatch):
    monkeypatch.setattr("swarmtune.engines.rolling._PREFILL_TOKENS", 64)
    texts = prompts(10, seed=21, longest=60)
    got = answers(model_folder, [ask(str(i), p) for i, p in enumerate(texts)])
    assert [got.tokens(str(i)) for i in range(10)] == [plain_greedy(plain, p, 12) for p in texts]


def test_same_seed_draws_the_same_whoever_else_is_there(tiny_folder):
    sampling = SamplingParams(max_tokens=16, seed=7, ignore_eos=True)
    prompt = prompts(1, seed=2)[0]
    alone = answers(tiny_folder, [ask("a", prompt, sampling)])
    others = [ask(f"o{i}", p, SamplingParams(max_tokens=9)) for i, p in enumerate(prompts(5, seed=3))]
    crowded = answers(tiny_folder, [*others, ask("a", prompt, sampling)])
    assert alone.tokens("a") == crowded.tokens("a")


def test_requests_without_seed_differ_but_the_whole_run_repeats_in_any_order(tiny_folder):
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    a, b = prompts(2, seed=4)
    one = answers(tiny_folder, [ask("a1", a, sampling), ask("a2", a, sampling), ask("b1", b, sampling)])
    two = answers(tiny_folder, [ask("b1", b, sampling), ask("a1", a, sampling), ask("a2", a, sampling)])
    other = answers(tiny_folder, [ask("a1", a, sampling)], seed=1)
    assert one.tokens("a1") != one.tokens("a2")
    assert [one.tokens(k) for k in ("a1", "a2", "b1")] == [two.tokens(k) for k in ("a1", "a2", "b1")]
    assert other.tokens("a1") != one.tokens("a1")


def test_abort_frees_the_row_at_once(model_folder, plain):
    batch = make_batch(model_folder, max_batch=1)
    run = Answers(batch)
    a, b = prompts(2, seed=6)
    batch.submit(ask("gone", a))
    batch.submit(ask("next", b))
    run.step(3)
    batch.abort("gone")
    run.step()
    assert len(run.chunks["gone"]) == 3
    assert len(run.chunks["next"]) == 1
    run.run()
    assert run.tokens("next") == plain_greedy(plain, b, 12)


def test_abort_of_a_waiting_request_means_it_never_runs(tiny_folder):
    batch = make_batch(tiny_folder, max_batch=1)
    for name in ("runs", "waits"):
        batch.submit(ask(name, [1, 2, 3]))
    batch.abort("waits")
    assert set(Answers(batch).run().chunks) == {"runs"}


def test_stop_token_ends_the_answer_and_is_part_of_it(tiny_folder):
    prompt = prompts(1, seed=8)[0]
    free = answers(tiny_folder, [ask("a", prompt)]).tokens("a")
    stop = free[5]
    ended = answers(
        tiny_folder, [ask("a", prompt, SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(stop,)))]
    )
    assert ended.tokens("a") == free[: free.index(stop) + 1]
    assert ended.last("a").finish_reason is FinishReason.STOP
    assert ended.last("a").stop_string is None


def test_end_of_turn_token_ends_the_answer_unless_ignored(tiny_folder):
    prompt = prompts(1, seed=8)[0]
    free = answers(tiny_folder, [ask("a", prompt)]).tokens("a")
    batch = make_batch(tiny_folder)
    batch._eos = frozenset({free[4]})
    for name, ignore in (("stops", False), ("goes on", True)):
        batch.submit(ask(name, prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=ignore)))
    run = Answers(batch).run()
    assert run.tokens("stops") == free[: free.index(free[4]) + 1]
    assert run.tokens("goes on") == free
    assert run.last("goes on").finish_reason is FinishReason.LENGTH


def test_stop_string_across_tokens_ends_the_answer(tiny_folder):
    batch = make_batch(tiny_folder)
    play(batch, byte_ids(tiny_folder, "one END. two STOP three"))
    sampling = SamplingParams(max_tokens=40, temperature=0.0, stop=("STOP", "OP"))
    batch.submit(ask("a", [1], sampling))
    run = Answers(batch).run()
    assert batch._decode(run.tokens("a")) == "one END. two STOP"
    assert run.last("a").stop_string == "STOP", "both end here; the one that begins first"
    assert run.last("a").finish_reason is FinishReason.STOP


def test_stop_string_of_bytes_split_over_tokens_is_found(tiny_folder):
    batch = make_batch(tiny_folder)
    play(batch, byte_ids(tiny_folder, "gut · naïve übrig"))
    batch.submit(ask("a", [1], SamplingParams(max_tokens=60, temperature=0.0, stop=("naïve",))))
    run = Answers(batch).run()
    assert run.last("a").stop_string == "naïve"
    assert batch._decode(run.tokens("a")) == "gut · naïve"


def test_stop_string_in_the_prompt_does_not_count(tiny_folder):
    batch = make_batch(tiny_folder)
    play(batch, byte_ids(tiny_folder, "P and more"))
    prompt = byte_ids(tiny_folder, "STO")
    batch.submit(ask("a", prompt, SamplingParams(max_tokens=10, temperature=0.0, stop=("STOP",))))
    assert Answers(batch).run().last("a").finish_reason is FinishReason.LENGTH


def test_top_logprobs_are_the_most_likely_tokens(model_folder, plain):
    prompt = prompts(1, seed=12)[0]
    with torch.no_grad():
        reference = torch.log_softmax(plain(torch.tensor([prompt])).logits[0, -1].float(), -1).topk(5)
    got = answers(
        model_folder,
        [
            ask("five", prompt, SamplingParams(max_tokens=1, top_logprobs=5)),
            ask("two", prompt, SamplingParams(max_tokens=1, top_logprobs=2)),
            ask("none", prompt, SamplingParams(max_tokens=1)),
        ],
    )
    five = got.last("five").top_logprobs[0]
    assert list(five) == reference.indices.tolist()
    assert list(five.values()) == pytest.approx(reference.values.tolist(), abs=1e-4)
    assert list(got.last("two").top_logprobs[0]) == reference.indices.tolist()[:2]
    assert got.last("none").top_logprobs is None


def test_context_overflow_is_refused_before_generating(tiny_folder):
    batch = make_batch(tiny_folder)
    batch.submit(ask("fits", [1] * (CONTEXT - 12)))
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        batch.submit(ask("over", [1] * (CONTEXT - 11)))
    assert len(Answers(batch).run().tokens("fits")) == 12


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], GREEDY),
        ([272], GREEDY),
        ([-1], GREEDY),
        ([1], SamplingParams(max_tokens=0)),
        ([1], SamplingParams(max_tokens=4, temperature=float("nan"))),
        ([1], SamplingParams(max_tokens=4, temperature=-1.0)),
        ([1], SamplingParams(max_tokens=4, top_p=0.0)),
        ([1], SamplingParams(max_tokens=4, top_k=-1)),
    ],
)
def test_impossible_request_is_refused(tiny_folder, prompt, sampling):
    with pytest.raises(RequestRefused):
        make_batch(tiny_folder).submit(ask("bad", prompt, sampling))


def test_held_generation_continues_under_the_new_weights(tiny_folder):
    batch = make_batch(tiny_folder)
    run = Answers(batch)
    prompt = prompts(1, seed=14)[0]
    batch.submit(ask("a", prompt))
    run.step(5)
    batch.hold()
    changed = {name: tensor * 1.3 for name, tensor in batch.model.state_dict().items()}
    batch.take_weights(changed.items(), version=1)
    run.run()
    tokens = run.tokens("a")
    assert [c.weight_version for c in run.chunks["a"]] == [0] * 5 + [1] * 7
    assert tokens[5:] == plain_greedy_of(batch.model, prompt + tokens[:5], 7)


def test_prefixes_kept_under_old_weights_are_forgotten_with_them(tiny_folder):
    batch = make_batch(tiny_folder)
    run = Answers(batch)
    prompt = prompts(1, seed=15)[0] + list(range(40))
    batch.submit(ask("old", prompt))
    run.run()
    batch.hold()
    changed = {name: tensor * 1.3 for name, tensor in batch.model.state_dict().items()}
    batch.take_weights(changed.items(), version=1)
    batch.submit(ask("new", prompt))
    run.run()
    assert run.tokens("new") == plain_greedy_of(batch.model, prompt, 12)
    assert run.tokens("new") != run.tokens("old")


def test_logits_that_are_not_finite_end_the_request_with_an_error(tiny_folder):
    batch = make_batch(tiny_folder)
    batch.take_weights([(n, torch.full_like(t, float("nan"))) for n, t in batch.model.state_dict().items()], version=1)
    batch.submit(ask("a", [1, 2]))
    run = Answers(batch).run()
    assert "not finite" in str(run.errors["a"])
    assert not batch.has_work


def test_weights_that_do_not_fit_are_refused(tiny_folder):
    batch = make_batch(tiny_folder)
    weights = dict(batch.model.state_dict())
    with pytest.raises(ValueError, match="no such weight"):
        batch.take_weights([("model.nothing", torch.zeros(1))], version=1)
    with pytest.raises(ValueError, match="shape"):
        batch.take_weights([("model.norm.weight", torch.zeros(1))], version=1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"left out 1 weights, among them model\.norm\.weight"):
        batch.take_weights(weights.items(), version=1)


def spy_on_forward(batch: RollingBatch) -> list[tuple[int, ...]]:
    """Shapes of the token tensors the model computes from now on."""
    shapes: list[tuple[int, ...]] = []
    batch.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def play(batch: RollingBatch, script: list[int]) -> None:
    """Make a batch of one request say `script`: a logit bias on the next scripted token."""
    steps = iter(script)

    def force(_module, _args, output):
        output.logits[:, -1, next(steps)] = 1e4
        return output

    batch.model.register_forward_hook(force)


def byte_ids(folder: Path, text: str) -> list[int]:
    """The text in the tiny models' tokenizer: one token per byte."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def plain_greedy_of(model, prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            width = len(context)
            mask = torch.full((width, width), torch.finfo(torch.float32).min).triu(1)
            grouped = mask.expand(1, 1, 2, width, width).reshape(1, 1, -1, width)
            context.append(
                int(model(torch.tensor([context]), attention_mask=grouped, use_cache=False).logits[0, -1].argmax())
            )
    return context[len(prompt) :]
