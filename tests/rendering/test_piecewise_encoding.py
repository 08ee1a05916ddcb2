"""What is encoded piece by piece has the ids, and the cuts, of the whole text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from swarmtune.rendering.pieces import _CL100K, _GPT2, PieceEncoder, piecewise
from swarmtune.rendering.tokenizer import Tokenizer as OurTokenizer

CORPUS = [
    "the quick brown fox isn't there, they've 12 34567 dogs! \n\n  indented\tcode(x, y) = {a: 1};\r\n ünïcode 漢字 é",
    "return the value of the house over the tree and of   the   other trees \n \n x",
] * 20
FORMS = {
    "byte_level": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "digits": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    **{
        name: [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for name, pattern in (("gpt2", _GPT2), ("qwen", _CL100K % ""), ("llama3", _CL100K % "{1,3}"))
    },
}
PARTS = (
    "the",
    "house",
    " ",
    "  ",
    "\n",
    "\t",
    " \n",
    "'ve",
    "12",
    "!",
    "é",
    "e\u0301",
    "漢",
    "\u00a0",
    "\x85",
    "🙂",
)
MARKS = ("<|a|>", "<|ab|>", "<|")


def trained(form: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(FORMS[form])  # pyright: ignore[reportAttributeAccessIssue]
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<|a|>", "<|ab|>"])
    return tokenizer


TOKENIZERS = {form: trained(form) for form in FORMS} | {"nfc": trained("qwen", normalizers.NFC())}


def encoder_of(tokenizer: Tokenizer) -> PieceEncoder:
    encoder = piecewise(tokenizer)
    assert encoder is not None
    return encoder


ENCODERS = {form: encoder_of(tokenizer) for form, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("form", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS + MARKS), max_size=30).map("".join), st.lists(st.floats(0, 1), max_size=4))
def test_ids_and_cuts_are_those_of_the_whole_text(form: str, text: str, places: list[float]) -> None:
    cuts = sorted(round(place * len(text)) for place in places)
    whole = OurTokenizer(TOKENIZERS[form]).encode_with_offsets(text)
    encoder = ENCODERS[form]
    for _ in range(2):  # new, then remembered
        assert encoder.encode_cut(text, cuts) == (whole.token_ids, [whole.token_at(cut) for cut in cuts])


@pytest.mark.parametrize("form", TOKENIZERS)
def test_words_of_earlier_texts_give_the_ids_of_the_whole_text(form: str) -> None:
    draw, encoder = random.Random(0), encoder_of(TOKENIZERS[form])
    words = ["house", "isn't", "12", "x=1", "(the", "tree\n", "\n\nover", "漢字", "a\t", ""]
    for _ in range(200):
        text = " ".join(draw.choices(words, weights=[9] * 9 + [1], k=60))
        assert encoder.encode(text) == TOKENIZERS[form].encode(text, add_special_tokens=False).ids
    assert encoder._words


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtune.rendering.pieces.PIECES_CHARACTERS", 2_000)
    monkeypatch.setattr("swarmtune.rendering.pieces.WORDS", 50)
    encoder = encoder_of(TOKENIZERS["qwen"])
    for n in range(300):
        encoder.encode(" ".join(f"w{n}x{m}" for m in range(20)))
    assert sum(map(len, encoder._pieces)) <= 2_000
    assert len(encoder._words) <= 50
    assert len(encoder._heads) <= 50


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\S+ \S+"), "isolated")),
        lambda t: setattr(t, "normalizer", normalizers.Prepend("_")),
        lambda t: t.add_special_tokens([AddedToken("<|wide|>", lstrip=True)]),
    ],
)
def test_a_tokenizer_that_may_join_words_is_asked_for_the_whole_text(spoil) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS["qwen"].to_str())
    spoil(tokenizer)
    assert piecewise(tokenizer) is None
