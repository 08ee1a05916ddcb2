"""veRL on a CPU: the platform plugin and the registration of veRL's FSDP engine for device "cpu".

veRL loads this module through the entry-point group `verl.plugins`, or through
`VERL_USE_EXTERNAL_MODULES=swarmtune.trainer.cpu_platform`; in both cases `VERL_PLATFORM=cpu` selects it, so that on a
machine with an accelerator nothing changes. `activate()` does the same from inside a process and needs neither.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager, set_platform

PLATFORM = "cpu"


class _DeviceModule(ModuleType):
    """What veRL expects of `torch.<device>`: a CPU has one device, no allocator statistics, and nothing to wait for."""

    def __init__(self) -> None:
        super().__init__("torch.cpu")

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: Any) -> None:
        del device

    def synchronize(self, device: Any = None) -> None:
        del device

    def empty_cache(self) -> None:
        return

    def ipc_collect(self) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        del device
        return 0

    def memory_reserved(self, device: Any = None) -> int:
        del device
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        del device
        return 0

    def max_memory_reserved(self, device: Any = None) -> int:
        del device
        return 0

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        del device

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        del device
        return 0, 0


@PlatformRegistry.register(platform=PLATFORM)
class CpuPlatform(PlatformBase):
    """One CPU as veRL's device, gloo as its collective backend."""

    def __init__(self) -> None:
        self._module = _DeviceModule()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never detected by itself: the driver of a GPU cluster often has no GPU and must not train on its CPU."""
        return False

    def current_device(self) -> Any:
        """A torch device, not an index: veRL hands it to `Tensor.to`, where 0 would mean the first GPU."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "SWARMTUNE_VISIBLE_CPUS"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride] - untyped there
        yield

    def profiler_start(self) -> None:
        return

    def profiler_stop(self) -> None:
        return

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def activate() -> None:
    """Make the CPU this process's veRL platform and register the engines. Idempotent.

    Call it before anything imports `verl.workers.engine`, which fixes the device at import.
    """
    current = platform_manager._current_platform  # get_platform() would resolve it to a guess
    if current is None or current.device_name != PLATFORM:
        set_platform(CpuPlatform())
    register_engines()


def register_engines() -> None:
    """Register the FSDP engines for device "cpu": veRL registers them for cuda and npu only. Idempotent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* engine is not available")
        from verl.workers.engine.base import EngineRegistry

    from swarmtune.trainer.fsdp_cpu import SelectiveFSDPEngine, SelectiveValueEngine

    backends = ["fsdp", "fsdp2"]
    for model_type, engine in (("language_model", SelectiveFSDPEngine), ("value_model", SelectiveValueEngine)):
        known = EngineRegistry._engines.get(model_type, {})
        missing = [b for b in backends if "cpu" not in known.get(b, {})]
        if missing:
            EngineRegistry.register(model_type=model_type, backend=missing, device="cpu")(engine)


if os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM:
    register_engines()
