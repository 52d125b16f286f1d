"""Export of a model's graphs as MindIR files. `model_config.backend: ge` runs them without this package's lowering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.errors import ConfigError
from llm_serving.lowering.lower import Lowered, lower
from llm_serving.lowering.step_inputs import KVCaches, dynamic_inputs
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.quantization import Quantization

GRAPHS: Final = ("states", "head")
SETTINGS_FILE: Final = "mindir.json"


def inputs_of(spec: ModelSpec, graph: str) -> list[ms.Tensor]:
    return Lowered.head_inputs(spec.network.hidden) if graph == "head" else dynamic_inputs()


def graph_file(folder: Path, graph: str) -> Path:
    """Return the path of a graph. MindSpore splits it into `<graph>_graph.mindir` and data files above 1 GB."""
    split = folder / f"{graph}_graph.mindir"
    return split if split.is_file() else folder / f"{graph}.mindir"


def write_mindir(network: nn.Cell, path: Path, inputs: Sequence[ms.Tensor]) -> None:
    """Write a graph to `path` (*.mindir). The graph accepts any size for each dynamic dimension of `inputs`."""
    network.set_train(False)
    network.set_inputs(*inputs)
    ms.export(network, *inputs, file_name=str(path), file_format="MINDIR")


def export(
    spec: ModelSpec,
    backend: Backend,
    source: Path,
    folder: Path,
    kv_caches: KVCaches,
    max_positions: int,
    quantization: Quantization | None = None,
) -> None:
    """Write a model's graphs as MindIR, with weights and caches, and a JSON file with the settings they depend on."""
    reader = WeightReader(source, spec.scheme)
    lowered = lower(spec, backend, reader, kv_caches, max_positions, as_program=False, quantization=quantization)
    for graph in GRAPHS:
        write_mindir(getattr(lowered, graph), folder / f"{graph}.mindir", inputs_of(spec, graph))
    num_blocks, block_size = kv_caches[0][0].shape[:2]
    quantization_name = None if quantization is None else str(quantization.name)
    settings = graph_settings(spec, backend.dtype, quantization_name, num_blocks, block_size, max_positions)
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")


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
    found = json.loads(path.read_text())
    for name, value in expected.items():
        if found.get(name) != value:
            raise ConfigError(
                f"`model_config.mindir_path`: {path} has {name} {found.get(name)}, but the configuration has {value}; "
                "export the graphs again with `llm-serving export`"
            )
