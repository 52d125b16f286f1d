"""Typed configuration: `load_config` reads YAML, overrides and a model folder into a checked `ServingConfig`."""

from llm_serving.config.loader import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.device import CacheConfig, DeviceConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "ServingConfig",
    "load_config",
]
