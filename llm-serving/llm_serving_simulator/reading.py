"""A load out of whatever file somebody names."""

from __future__ import annotations

from pathlib import Path

from llm_serving.config.schema import ServingConfig
from llm_serving.errors import ConfigError

from llm_serving_simulator.load import Load
from llm_serving_simulator.recorded_load import read_recorded
from llm_serving_simulator.workload import read_workload

YAML_SUFFIXES = (".yaml", ".yml")


def read_load(path: Path, seed: int | None = None) -> Load:
    """Reads a workload file (*.yaml) or a recording (*.rec, or a folder of them).

    Raises:
        ConfigError: With file, line and rule.
        RecordingError: A recording cannot be used.
    """
    if path.suffix in YAML_SUFFIXES:
        return read_workload(path, seed)
    if path.suffix == ".rec" or path.is_dir():
        if seed is not None:
            raise ConfigError(f"--load-seed must stand beside a workload (*.yaml): {path} is what was. Given: {seed}")
        return read_recorded(path)
    raise ConfigError(f"{path}: must be a workload (*.yaml), or a recording (*.rec, or a folder of them)")


def check_model(path: Path, load: Load, config: ServingConfig) -> None:
    """Raises ConfigError where a recording has a token that the model of a configuration has not."""
    num_tokens = config.model.vocab_size
    if path.suffix not in YAML_SUFFIXES and num_tokens is not None and load.vocab_size > num_tokens:
        rule = f"must be a recording of the model that is simulated, which has {num_tokens} tokens"
        raise ConfigError(f"{path}: {rule}; `--model none` simulates without one. Given: token {load.vocab_size - 1}")
