"""Both graphs of primitives of a family, exported to MINDIR, read again and run by the operator library.

    PYTHONPATH=tests .venv/bin/python -m families.exported [NAME ...] [--quantization w8a8]

Prints for each family whether what was read again gives the bits of the network it was made of. Some 10 s a family.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from families import models
from graph_model import BLOCK_SIZE, backend
from llm_serving.core.choices import QuantizationName
from llm_serving.lowering import mindir
from llm_serving.lowering.lower import Lowered, lower
from llm_serving.lowering.step import arguments_of_rows, dynamic_inputs
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weights import WeightReader
from llm_serving.network.coded import Quantization
from llm_serving.network.primitives import lacking, lacking_of_codes
from llm_serving.worker.compiled_network import CompiledNetwork
from llm_serving.worker.kv_tensors import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, ModelLimits, build_model_inputs
from mindspore import nn
from mindspore.train.mind_ir_pb2 import ModelProto
from step_factories import step_input

NUM_BLOCKS = 16
ROWS = {"states": None, "of_prompts": 4}
"""Requests of each graph, where they are fixed."""

POSITIONS = NUM_BLOCKS * BLOCK_SIZE


def networks_of(
    name: str,
    folder: Path,
    dtype: str = "bfloat16",
    quantization: Quantization | None = None,
    changes: dict[str, Any] | None = None,
    num_ranks: int = 1,
) -> tuple[ModelSpec, Lowered]:
    """The graphs that Ascend would run, with a cache of their own; those of the last of several ranks.

    Raises:
        ModelError: The primitives lack something that the family needs.
    """
    models.write(name, folder, changes=changes)
    spec = dataclasses.replace(ModelSpec.from_folder(folder), max_position_embeddings=POSITIONS)
    spec = spec.of_rank(num_ranks - 1, num_ranks)
    ascend = backend("ascend", dtype)
    kv_tensors = KVTensors.allocate(spec, ascend, NUM_BLOCKS, BLOCK_SIZE)
    ways = {"as_program": False, "whole_prompts": True, "quantization": quantization}
    return spec, lower(spec, ascend, WeightReader(folder), kv_tensors.layers, POSITIONS, **ways)


def export(network: nn.Cell, path: Path, inputs: Sequence[ms.Tensor]) -> ModelProto:
    """Writes a graph of every shape to `path` (*.mindir); what was written."""
    mindir.write_mindir(network, path, inputs)
    written = ModelProto()
    written.ParseFromString(path.read_bytes())
    return written


def inputs_of(spec: ModelSpec, graph: str) -> list[ms.Tensor]:
    return dynamic_inputs(ROWS[graph]) if graph == "of_prompts" else mindir.inputs_of(spec, graph)


def export_all(spec: ModelSpec, networks: Lowered, folder: Path) -> dict[str, ModelProto]:
    """Graph -> what was written to `<folder>/<graph>.mindir`."""
    return {
        graph: export(getattr(networks, graph), folder / f"{graph}.mindir", inputs_of(spec, graph))
        for graph in (*ROWS, "head")
    }


def read_again(spec: ModelSpec, folder: Path, graph: str) -> CompiledNetwork:
    return CompiledNetwork(nn.GraphCell(ms.load(str(folder / f"{graph}.mindir"))), inputs_of(spec, graph))


def steps(spec: ModelSpec) -> Iterator[tuple[str, ModelInputs]]:
    """A step of prompts and what decodes and chunks come after it: (graph that computes it, its inputs)."""
    limits = ModelLimits(spec.vocab_size, POSITIONS, NUM_BLOCKS, BLOCK_SIZE)
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, 150).tolist()
    prompts = [(tokens[:40], 0, [3, 9, 1]), (tokens[:1], 0, [5]), (tokens[50:150], 0, [2, 4, 6, 8, 10, 12, 14])]
    chunks = [(tokens[40:41], 40, [3, 9, 1]), (tokens[1:30], 1, [5, 7])]
    for graph, rows in (("of_prompts", prompts), ("states", prompts), ("states", chunks)):
        yield graph, build_model_inputs(step_input(rows), NO_TOKENS, limits)


def differences(spec: ModelSpec, networks: Lowered, folder: Path) -> list[str]:
    """Steps for which what `export_all` wrote gives other bits; the logits are those of the last token of each row."""
    heads = CompiledNetwork(networks.head, inputs_of(spec, "head")), read_again(spec, folder, "head")
    different = []
    for graph, num_rows in ROWS.items():
        both = CompiledNetwork(getattr(networks, graph), inputs_of(spec, graph)), read_again(spec, folder, graph)
        for index, (computed_by, inputs) in enumerate(steps(spec)):
            if computed_by != graph:
                continue
            arrays = (inputs if num_rows is None else inputs.with_rows(num_rows)).arrays()
            states = [network(arrays).copy() for network in both]
            logits, again = (
                head((rows, *arguments_of_rows(len(rows)))).copy() for head, rows in zip(heads, states, strict=True)
            )
            if not np.isfinite(logits).all() or logits.tobytes() != again.tobytes():
                different.append(f"{graph}, step {index}")
    return different


def check(name: str, folder: Path, quantization: Quantization | None = None) -> list[str]:
    spec, networks = networks_of(name, folder, quantization=quantization)
    export_all(spec, networks, folder)
    return differences(spec, networks, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=models.names(), metavar="NAME")
    parser.add_argument("--quantization", choices=[str(QuantizationName.W8A8)], help="how weights are kept")
    arguments = parser.parse_args()
    kept = arguments.quantization
    quantization = None if kept is None else Quantization(QuantizationName(kept))
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            models.write(name, Path(folder))
            network = ModelSpec.from_folder(Path(folder)).network
            lacks = lacking(network, POSITIONS) or lacking_of_codes(network, quantization)
            found = [] if lacks else check(name, Path(folder), quantization)
        sys.stdout.write(f"{name:24} {f'no {lacks}' if lacks else '; '.join(found) or 'same bits'}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
