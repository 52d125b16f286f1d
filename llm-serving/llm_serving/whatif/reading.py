"""A load out of whatever file somebody names."""

from __future__ import annotations

from pathlib import Path

from llm_serving.errors import ConfigError
from llm_serving.whatif.load import Load
from llm_serving.whatif.recorded_load import read_recorded
from llm_serving.whatif.workload import read_workload

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
