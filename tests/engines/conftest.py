"""Tiny models of two families, built here: byte-level tokenizer, random weights from a fixed seed, fp32."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

EOS = 257
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
FAMILIES = {
    "llama": (LlamaConfig(**SHAPE, tie_word_embeddings=True), LlamaForCausalLM),
    "qwen3": (Qwen3Config(**SHAPE, tie_word_embeddings=False), Qwen3ForCausalLM),
}


def byte_tokenizer() -> Tokenizer:
    """One token per byte, ids 0..255; 256 and 257 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def build_model(folder: Path, config: PretrainedConfig, model_class: type) -> Path:
    torch.manual_seed(0)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3 if "embed" in name else 0.15)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session", params=list(FAMILIES))
def model_folder(request, tmp_path_factory) -> Path:
    """Each family in turn."""
    return build_model(tmp_path_factory.mktemp(request.param), *FAMILIES[request.param])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny"), *FAMILIES["llama"])


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory) -> Path:
    """Made for 8192 tokens, so that a generation can outlast any test."""
    config = LlamaConfig(**SHAPE | {"max_position_embeddings": 8192}, tie_word_embeddings=True)
    return build_model(tmp_path_factory.mktemp("long"), config, LlamaForCausalLM)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Leave the machine's other cores to the other tests."""
    torch.set_num_threads(1)
