"""The errors of small encoders and rerankers against `transformers` in float32, as a table.

PYTHONPATH=tests .venv/bin/python -m families.encoder_precision
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from families import encoders
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import Float32Array
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.models.pooling import pooling_mode
from llm_serving.models.weight_reader import check_folder
from llm_serving.worker.model_runner import ModelRunner
from support.fragile_harness import FragileHarness
from support.graph_model import backend, poison

NUM_BLOCKS, BLOCK_SIZE = 40, 16


class Served:
    """A small encoder, and engines that share one runner of it."""

    def __init__(self, name: str, folder: Path, dtype: str = "float32", *, as_program: bool = True) -> None:
        encoders.write(name, folder)
        spec = check_folder(folder)
        made = backend("cpu", dtype)
        self.name, self.vocab, self.is_causal = name, spec.network.vocab, spec.network.causal
        self.pooling = pooling_mode("auto", folder, spec)
        self._runner = ModelRunner(spec, folder, made, NUM_BLOCKS, BLOCK_SIZE, 256, as_program=as_program)

    def harness(self, **scheduler: int) -> FragileHarness:
        """An engine whose cache is filled with NaN."""
        options = {"max_num_batched_tokens": 300, "max_model_len": 256, "whole_prompts": not self.is_causal}
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
        harness = FragileHarness(new_runner=self._new_runner, **options | sizes | scheduler)
        engine = harness.engine
        engine._builder = StepBuilder(harness.scheduler.blocks, self.pooling)
        engine._build_step = engine._builder.build
        return harness

    def answers(self, harness: FragileHarness, *lengths: int) -> list[Float32Array]:
        requests = [self.request(length) for length in lengths]
        for request in requests:
            harness.engine.submit(request)
        harness.run()
        vectors = [harness.last(request.request_id).vector for request in requests]
        return [vector for vector in vectors if vector is not None]

    def request(self, length: int) -> Request:
        ids, types = encoders.prompt(self.name, length)
        typed = (ids + types * self.vocab).tolist()
        return Request(f"{length}", typed, SamplingParams(max_tokens=0), wants_vector=True)

    def _new_runner(self) -> ModelRunner:
        poison(self._runner.kv_tensors, range(NUM_BLOCKS))
        self._runner._next_step = 0
        return self._runner


def largest_error(name: str, dtype: str) -> float:
    """Return the largest error of a model's vectors or scores, divided by the largest value if this exceeds 1."""
    golden = encoders.golden(name)
    with tempfile.TemporaryDirectory() as folder:
        served = Served(name, Path(folder), dtype)
        vectors = served.answers(served.harness(), *golden)
    errors = [
        float(np.abs(vector - expected).max()) / max(1.0, float(np.abs(expected).max()))
        for vector, expected in zip(vectors, golden.values(), strict=True)
    ]
    return max(errors)


def main() -> None:
    sys.stdout.write("| model | float32 | bfloat16 |\n| --- | --- | --- |\n")
    for name in encoders.models():
        cells = [f"{largest_error(name, dtype):.1e}" for dtype in ("float32", "bfloat16")]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
