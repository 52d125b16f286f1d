"""Both graphs of primitives of a family, exported to MINDIR, read again and run by the operator library.

    PYTHONPATH=tests .venv/bin/python -m families.exported [NAME ...] [--kinds bfloat16 ..] [--table FILE] [--done FILE]

Prints, as it goes, whether what was read again gives the bits of the network it was made of, then a table of all, and
ends with 1 where one differs. Some 10 s for each kind of a family; a family whose graph differs from that of another
in nothing but the numbers in its weights and tables is not asked again, unless `--every` says so. With `--done` what
was found as expected is kept in a file: a run that was ended goes on where it was, and what failed is asked again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from families import models
from llm_serving.core.enums import QuantizationName
from llm_serving.lowering import mindir
from llm_serving.lowering.lower import Lowered, lower
from llm_serving.lowering.step_inputs import dynamic_inputs, step_inputs_for_rows
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.builder import Network
from llm_serving.network.quantization import Quantization, unsupported_by_ascend, unsupported_quantization
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.kv_cache import KVTensors
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, ModelLimits, build_model_inputs
from llm_serving_tools.mindir import write_mindir
from mindspore import nn
from mindspore.train.mind_ir_pb2 import ModelProto
from support.graph_model import BLOCK_SIZE, backend
from support.step_factories import step_input

NUM_BLOCKS = 16
ROWS = {"states": None, "of_prompts": 4}
"""Requests of each graph, if their number is fixed."""

POSITIONS = NUM_BLOCKS * BLOCK_SIZE
KINDS: Mapping[str, tuple[str, Quantization | None]] = {
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "w8a8": ("bfloat16", Quantization(QuantizationName.W8A8)),
}
"""Name -> dtype of the model, and format of its weights."""

SAME = "same bits"


def networks_of(
    name: str,
    folder: Path,
    dtype: str = "bfloat16",
    quantization: Quantization | None = None,
    changes: dict[str, Any] | None = None,
    num_ranks: int = 1,
    ascend: str = "ascend",
) -> tuple[ModelSpec, Lowered]:
    """The graphs that Ascend would run, with a cache of their own; those of the last of several ranks.

    Raises:
        ModelError: The primitives lack something that the family needs.
    """
    models.write(name, folder, changes=changes)
    spec = dataclasses.replace(ModelSpec.from_folder(folder), max_position_embeddings=POSITIONS)
    spec = spec.of_rank(num_ranks - 1, num_ranks)
    chosen = backend(ascend, dtype)
    kv_tensors = KVTensors.allocate(spec, chosen, NUM_BLOCKS, BLOCK_SIZE)
    ways = {"as_program": False, "whole_prompts": True, "quantization": quantization}
    return spec, lower(spec, chosen, WeightReader(folder), kv_tensors.layers, POSITIONS, **ways)


def export(network: nn.Cell, path: Path, inputs: Sequence[ms.Tensor]) -> ModelProto:
    """Write a graph of every shape to `path` (*.mindir) and return what was written."""
    write_mindir(network, path, inputs)
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
    """A prefill step, decode steps and chunks: (graph that computes it, its inputs)."""
    limits = ModelLimits(spec.vocab_size, POSITIONS, NUM_BLOCKS, BLOCK_SIZE)
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, 150).tolist()
    prompts = [(tokens[:40], 0, [3, 9, 1]), (tokens[:1], 0, [5]), (tokens[50:150], 0, [2, 4, 6, 8, 10, 12, 14])]
    chunks = [(tokens[40:41], 40, [3, 9, 1]), (tokens[1:30], 1, [5, 7])]
    for graph, rows in (("of_prompts", prompts), ("states", prompts), ("states", chunks)):
        yield graph, build_model_inputs(step_input(rows), NO_TOKENS, limits)


def differences(spec: ModelSpec, networks: Lowered, folder: Path) -> list[str]:
    """Steps for which the exported graphs give other bits; the logits are those of the last token of each row."""
    heads = CompiledNetwork(networks.head, inputs_of(spec, "head")), read_again(spec, folder, "head")
    different = []
    for graph, num_rows in ROWS.items():
        both = CompiledNetwork(getattr(networks, graph), inputs_of(spec, graph)), read_again(spec, folder, graph)
        for index, (computed_by, inputs) in enumerate(steps(spec)):
            if computed_by != graph:
                continue
            arrays = (inputs if num_rows is None else inputs.padded_to(num_rows)).arrays()
            states = [network(arrays).copy() for network in both]
            logits, again = (
                head((rows, *step_inputs_for_rows(len(rows)))).copy() for head, rows in zip(heads, states, strict=True)
            )
            if not np.isfinite(logits).all() or logits.tobytes() != again.tobytes():
                different.append(f"{graph}, step {index}")
    return different


def check(name: str, folder: Path, dtype: str = "bfloat16", quantization: Quantization | None = None) -> list[str]:
    spec, networks = networks_of(name, folder, dtype, quantization)
    export_all(spec, networks, folder)
    return differences(spec, networks, folder)


def graph_of(network: Network) -> str:
    """The common key of networks whose graphs differ in weights and tables only."""
    described = [
        (
            operation.kind,
            sorted((name, str(value)) for name, value in operation.attributes.items()),
            sorted((role, weight.shape, weight.dtype) for role, weight in operation.weights.items()),
            sorted((role, value.width, value.start) for role, value in operation.inputs.items()),
        )
        for operation in network.operations
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


class Kept:
    """Results as expected, which a later run does not repeat.

    Args:
        file: JSON, rewritten with each result; None: no file.
    """

    def __init__(self, file: Path | None) -> None:
        read = json.loads(file.read_text()) if file is not None and file.exists() else {"found": {}, "asked": []}
        self._file = file
        self._found: dict[str, dict[str, str]] = read["found"]
        self.asked: dict[tuple[str, str], str] = {(graph, kind): result for graph, kind, result in read["asked"]}
        """(graph, kind) -> result of a model with that graph."""

    def earlier_result(self, name: str, kind: str) -> str | None:
        """Return the earlier result of a model; None: it must be computed."""
        return self._found.get(name, {}).get(kind)

    def add(self, name: str, kind: str, result: str) -> None:
        if self._file is None or not is_expected(result):
            return
        self._found.setdefault(name, {})[kind] = result
        asked = [(*key, each) for key, each in self.asked.items() if is_expected(each)]
        self._file.write_text(json.dumps({"found": self._found, "asked": asked}, indent=1))


def found_of(name: str, kind: str, asked: dict[tuple[str, str], str]) -> str:
    """Return the result of a model: SAME, what the primitives lack, or which steps differ.

    Args:
        name: Name of the model.
        kind: One of KINDS.
        asked: (graph, kind) -> result of an earlier model; the new result is added.
    """
    dtype, quantization = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        models.write(name, Path(folder))
        network = ModelSpec.from_folder(Path(folder)).network
        if lacks := unsupported_by_ascend(network, POSITIONS) or unsupported_quantization(quantization):
            return f"no {lacks}"
        key = graph_of(network), kind
        if key not in asked:
            asked[key] = "; ".join(check(name, Path(folder), dtype, quantization)) or SAME
        return asked[key]


def table_of(found: Mapping[str, Mapping[str, str]], kinds: Sequence[str]) -> str:
    """Return Markdown with a line for each group of models that have the same result."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, of_kinds in found.items():
        groups.setdefault(tuple(of_kinds[kind] for kind in kinds), []).append(name)
    lines = [f"| models | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in groups.items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=models.names(), metavar="NAME")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="how weights are kept")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where the table is written as well")
    parser.add_argument("--done", type=Path, metavar="FILE", help="JSON of what was found, not asked again")
    parser.add_argument("--every", action="store_true", help="ask those of a graph that was asked before, too")
    arguments = parser.parse_args(argv)
    kept = Kept(arguments.done)
    found: dict[str, dict[str, str]] = {}
    for number, name in enumerate(arguments.names, 1):
        for kind in arguments.kinds:
            if (before := kept.earlier_result(name, kind)) is not None:
                found.setdefault(name, {})[kind] = before
                continue
            begun = time.monotonic()
            try:
                result = found_of(name, kind, {} if arguments.every else kept.asked)
            except Exception as error:  # noqa: BLE001  the others are asked all the same
                result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            found.setdefault(name, {})[kind] = result
            kept.add(name, kind, result)
            seconds = time.monotonic() - begun
            sys.stdout.write(f"{number:3}/{len(arguments.names)} {name:24} {kind:9} {seconds:5.1f} s  {result}\n")
            sys.stdout.flush()
    table = table_of(found, arguments.kinds)
    sys.stdout.write(f"\n{table}")
    if arguments.table is not None:
        arguments.table.write_text(table)
    wrong = [name for name, result in found.items() if not all(is_expected(each) for each in result.values())]
    sys.stdout.write(f"\n{len(found) - len(wrong)} of {len(found)} models as expected\n")
    return 1 if wrong else 0


def is_expected(result: str) -> bool:
    """Return whether the result is the same bits, or a refusal that names the missing operation."""
    return result == SAME or result.startswith("no ")


if __name__ == "__main__":
    sys.exit(main())
