"""swarmtune: a swarm server trains a model; swarm clients anywhere run agents against it and report rewards."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmtune.client import AsyncSwarmClient, SwarmClient
    from swarmtune.config import ConfigError, TrainConfig
    from swarmtune.swarm import AsyncSwarm, Swarm

__version__ = "0.1.0"
__all__ = ["AsyncSwarm", "AsyncSwarmClient", "ConfigError", "Swarm", "SwarmClient", "TrainConfig", "__version__"]

_HOME = {
    "AsyncSwarm": "swarmtune.swarm",
    "AsyncSwarmClient": "swarmtune.client",
    "ConfigError": "swarmtune.config",
    "Swarm": "swarmtune.swarm",
    "SwarmClient": "swarmtune.client",
    "TrainConfig": "swarmtune.config",
}


def __getattr__(name: str) -> Any:
    """Load what is exported when it is first asked for: `import swarmtune` itself stays immediate."""
    if name not in _HOME:
        raise AttributeError(f"module 'swarmtune' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
