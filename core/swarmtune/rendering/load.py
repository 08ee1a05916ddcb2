"""Which renderer a model gets."""

from __future__ import annotations

from pathlib import Path

from swarmtune.rendering.generic import GenericRenderer
from swarmtune.rendering.known import KnownRenderer, family_of
from swarmtune.rendering.renderer import Renderer


def load_renderer(model_path: str | Path, name: str = "auto") -> Renderer:
    """The renderer of a Hugging Face model folder.

    Args:
        name: `generic` for the model's own chat template; a family of the library `renderers` (`qwen3`, `llama-3`, …);
        or
            `auto`: the family of a model that the library knows by name, where it is installed, else `generic`.

    Raises:
        FileNotFoundError: tokenizer or chat template is missing.
        ValueError: unknown family, or one whose special tokens this tokenizer lacks.
        ModuleNotFoundError: a family is asked for and the library is not installed.
    """
    folder = Path(model_path)
    family = family_of(folder) if name == "auto" else name
    if family is None or family == "generic":
        return GenericRenderer.load(folder)
    return KnownRenderer.load(folder, family)
