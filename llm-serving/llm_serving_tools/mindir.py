"""Writes the graphs of a model as MindIR files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
from llm_serving.backends.base import Backend
from llm_serving.lowering.lower import lower
from llm_serving.lowering.mindir import GRAPHS, SETTINGS_FILE, graph_settings, inputs_of
from llm_serving.lowering.step_inputs import KVCaches
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.quantization import Quantization
from mindspore import nn


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
