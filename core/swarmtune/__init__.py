"""swarmtune: a swarm server trains a model; swarm clients anywhere run agents against it and report rewards."""

from swarmtune.config import ConfigError, TrainConfig

__version__ = "0.1.0"
__all__ = ["ConfigError", "TrainConfig", "__version__"]
