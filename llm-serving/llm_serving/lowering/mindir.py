"""Exported graphs of a model in MindIR files. `model_config.backend: ge` runs them without this package's lowering."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mindspore as ms

from llm_serving.core.files import read_json_object
from llm_serving.errors import ConfigError
from llm_serving.lowering.lower import Lowered
from llm_serving.lowering.step_inputs import dynamic_inputs
from llm_serving.models.spec import ModelSpec

GRAPHS: Final = ("states", "head")
SETTINGS_FILE: Final = "mindir.json"
_MAX_SETTINGS_BYTES: Final = 2**20


def inputs_of(spec: ModelSpec, graph: str) -> list[ms.Tensor]:
    return Lowered.head_inputs(spec.network.hidden) if graph == "head" else dynamic_inputs()


def graph_file(folder: Path, graph: str) -> Path:
    """Return the path of a graph. MindSpore splits it into `<graph>_graph.mindir` and data files above 1 GB."""
    split = folder / f"{graph}_graph.mindir"
    return split if split.is_file() else folder / f"{graph}.mindir"


def graph_settings(
    spec: ModelSpec, dtype: str, quantization: str | None, num_blocks: int, block_size: int, max_positions: int
) -> dict[str, Any]:
    """Return the settings of an exported graph. A server that uses the graph must have the same settings."""
    return {
        "architecture": spec.architecture,
        "num_parameters": spec.num_weight_elements,
        "vocab_size": spec.vocab_size,
        "model_dtype": dtype,
        "quantization": quantization,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_positions": max_positions,
    }


def check_graph_settings(folder: Path, expected: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a folder has graphs that were exported with the settings `expected`."""
    path = folder / SETTINGS_FILE
    missing = [each.name for each in (path, *(graph_file(folder, graph) for graph in GRAPHS)) if not each.is_file()]
    if missing:
        raise ConfigError(
            f"`model_config.mindir_path` {folder} must be a folder of `llm-serving export`; it lacks {missing[0]}"
        )
    found = read_json_object(path, _MAX_SETTINGS_BYTES)
    for name, value in expected.items():
        if found.get(name) != value:
            raise ConfigError(
                f"`model_config.mindir_path`: {path} has {name} {found.get(name)}, but the configuration has {value}; "
                "export the graphs again with `llm-serving export`"
            )
