"""Typed configuration: `load_config` reads YAML, overrides and a model folder into a checked `ServingConfig`."""

from llm_serving.config.loader import load_config
from llm_serving.config.schema import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    ServingConfig,
)

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "ServingConfig",
    "load_config",
]
