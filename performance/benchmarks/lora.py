"""Time of decode steps with adapters, relative to the same steps of the base model alone.

    python performance/run.py lora --model FOLDER [--adapters 1,8,32] [--rank 16] [--rows 32]

One WorkAgent's network computes steps of `--rows` requests with a context of `--context` tokens, in this process. The
reference is a network without slots of adapters; the same network with slots is measured with no adapter in use, then
with the rows distributed over each number of adapters. The kinds of steps are measured in turn, in several rounds;
median and lowest time are shown, with the throughput relative to the base. The last lines are the time to copy one
adapter from host memory to its slot, which delays one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llm_serving.backends import create_backend
from llm_serving.core.step import ResultKind, SamplingInput, StepInput
from llm_serving.models.spec import ModelSpec
from llm_serving.network.adapters import AdapterLimits
from llm_serving.worker.model_runner import ModelRunner
from safetensors.numpy import save_file

BLOCK_SIZE = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    spec = ModelSpec.from_folder(arguments.model)
    counts = [int(count) for count in arguments.adapters.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        sizes = [write_adapter(Path(folder) / str(n), spec, arguments.rank, n) for n in range(1, max(counts) + 1)]
        base = _runner(arguments, spec, None)
        adapted = _runner(arguments, spec, AdapterLimits(max(counts), arguments.rank))
        assert adapted.adapters is not None
        for number in range(1, max(counts) + 1):
            adapted.adapters.read(number, Path(folder) / str(number))
        print(f"{max(counts)} adapters of rank {arguments.rank}, {sizes[0] / 1e6:.1f} MB each")
        kinds = {"base model alone": (base, 0), "no adapter in use": (adapted, 0)}
        kinds |= {f"{count} adapters": (adapted, count) for count in counts}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(arguments.rounds):
            for name, (runner, count) in kinds.items():
                times[name] += measure(runner, count, arguments.rows, arguments.context, arguments.steps)
        for label, figure in (("median", statistics.median), ("lowest", min)):
            reference = figure(times["base model alone"])
            for name, taken in times.items():
                step_s = figure(taken)
                print(f"{name:20} {1e3 * step_s:8.2f} ms a step ({label}), throughput {reference / step_s:.2f}")
        copies = []
        for number in range(1, max(counts) + 1):
            began = time.perf_counter()
            adapted.adapters.slots_of_tokens(np.array([[number, number % max(counts)]], np.int32), np.ones(1, np.int32))
            copies.append(time.perf_counter() - began)
        for label, copied in (("median", statistics.median(copies)), ("lowest", min(copies))):
            print(f"copy to a slot       {1e3 * copied:8.2f} ms ({label}), {5e10 * copied / sizes[0]:.1f} ms for 50 MB")
    return 0


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> int:
    """Write an adapter of every linear layer with random float16 matrices; return the bytes of its file."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in spec.tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS and len(shape) == 2:
            prefix = f"base_model.model.{module}.lora_"
            tensors[f"{prefix}A.weight"] = rng.normal(0, 0.02, (rank, shape[1])).astype(np.float16)
            tensors[f"{prefix}B.weight"] = rng.normal(0, 0.02, (shape[0], rank)).astype(np.float16)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return (folder / "adapter_model.safetensors").stat().st_size


def measure(runner: ModelRunner, num_adapters: int, rows: int, context: int, steps: int) -> list[float]:
    """Return the duration of each decode step in seconds, without the first step, which copies adapters."""
    return [_run(runner, num_adapters, rows, context) for _ in range(steps + 1)][1:]


def _tables(rows: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    blocks = -(-(context + 1) // BLOCK_SIZE)
    return np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)


def _fill(runner: ModelRunner, rows: int, context: int) -> None:
    """Compute the contexts of all rows."""
    for table in _tables(rows, context):
        step = StepInput(
            step=runner._next_step,
            token_ids=np.full(context, 5, np.int32),
            query_lens=np.array([context], np.int32),
            num_computed=np.zeros(1, np.int32),
            block_tables=table[None],
            block_epochs=np.zeros_like(table[None]),
            result_tokens=np.array([(0, context - 1, ResultKind.TOKEN)], np.int32),
            sampling=SamplingInput.plain(1),
        )
        runner.execute(step)


def _run(runner: ModelRunner, num_adapters: int, rows: int, context: int) -> float:
    tables = _tables(rows, context)
    adapters = [(1 + row % num_adapters, row % num_adapters) for row in range(rows)] if num_adapters else []
    step = StepInput(
        step=runner._next_step,
        token_ids=np.full(rows, 5, np.int32),
        query_lens=np.ones(rows, np.int32),
        num_computed=np.full(rows, context, np.int32),
        block_tables=tables,
        block_epochs=np.zeros_like(tables),
        result_tokens=np.array([(row, 0, ResultKind.TOKEN) for row in range(rows)], np.int32),
        sampling=SamplingInput.plain(rows),
        adapters=np.array(adapters, np.int32).reshape(-1, 2),
    )
    began = time.perf_counter()
    runner.execute(step)
    return time.perf_counter() - began


def _runner(arguments: argparse.Namespace, spec: ModelSpec, limits: AdapterLimits | None) -> ModelRunner:
    num_blocks = arguments.rows * -(-(arguments.context + 1) // BLOCK_SIZE)
    backend = create_backend("cpu", arguments.dtype)
    runner = ModelRunner(
        spec, arguments.model, backend, num_blocks, BLOCK_SIZE, arguments.context + BLOCK_SIZE, adapters=limits
    )
    runner.warm_up()
    _fill(runner, arguments.rows, arguments.context)
    return runner


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--adapters", default="1,8,32", help="numbers of adapters (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="rank of each adapter (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="requests of a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens of each context (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="model dtype (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    return parser.parse_args(argv)
