"""The contract of an inference engine inside the engine process: tokens in, tokens out, weights on request.

An engine generates for many requests at once and takes new weights while it is paused. It knows nothing of the
server, of frames or of training. `hf.HFEngine` is the embedded one; another engine is one more file and one line in
`host.ENGINES`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from swarmtune.config import TrainConfig
from swarmtune.types import GenerateChunk, GenerateRequest

if TYPE_CHECKING:
    import torch

NamedTensors = Callable[[], "Iterable[tuple[str, torch.Tensor]]"]
"""Yields every weight by its Hugging Face name; called, and consumed, on the torch thread."""

SaveAdapter = Callable[[Path], None]
"""Writes the LoRA adapter as PEFT's files into an existing folder; called on the torch thread."""


class Engine(Protocol):
    """Every method is called on the event loop; heavy work belongs on `torch_thread`."""

    context_length: int
    """Tokens of prompt plus answer that fit: the configured length, at most what the model was made for."""

    takes_adapter: bool
    """Whether weights come as a LoRA adapter alone, by `load_adapter` instead of `load_weights`."""

    @property
    def constrains(self) -> bool:
        """Whether `SamplingParams.grammar` is obeyed; otherwise a request with one is refused."""
        ...

    @property
    def weight_version(self) -> int:
        """Of the weights in use: the step that made them."""
        ...

    @classmethod
    def load(cls, config: TrainConfig, model_path: Path, torch_thread: ThreadPoolExecutor, *, work_dir: Path) -> Self:
        """Read the model of a Hugging Face folder. Blocks; called on the torch thread.

        Args:
            work_dir: an existing folder for what the engine writes.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream one generation; closing the iterator aborts it and frees its place at once. Waits while paused.

        Raises:
            RequestRefused, ContextOverflow: before anything is generated.
            GenerateFailed: the engine raised; it goes on with other requests.
        """
        ...

    async def pause(self, *, drain_s: float) -> None:
        """Stop generating: nothing new begins, what runs may finish for `drain_s`, the rest is held and not dropped."""
        ...

    async def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """Take new weights while paused; held generations go on with them after `resume`, tokens so far kept.

        Raises:
            ValueError: a name or shape that does not fit, or a weight left out; the engine must not be used any more.
        """
        ...

    async def load_adapter(self, save: SaveAdapter, *, version: int) -> None:
        """The same for an engine that takes adapters: the base model's weights stay as they are.

        Raises:
            ValueError: the adapter does not fit; the engine must not be used any more.
        """
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """Abort what runs. Idempotent."""
        ...
