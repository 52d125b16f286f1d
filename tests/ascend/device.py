"""Loads models on the Ascend device of the stubs as a WorkAgent does, runs steps, and prints what was found as JSON.

Lines that start with `MARK` separate the output of MindSpore's kernels by step.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import timeit
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

MARK = "@@@"
KINDS = "greedy", "drawn", "limited", "nucleus", "sampled"
"""Kinds of sampling: the most likely tokens; tokens that the device draws, with neither `top_k` nor `top_p`, with both,
and with `top_p`; tokens with log-probabilities, which the host samples.
"""
NUM_SAMPLED_STEPS = 2
"""Number of steps of a job that run with each kind of sampling. The others are greedy, which is quicker."""
NUM_MEANS = 5
"""Number of means of CPU time, of which the least counts."""
COUNTS = (
    "to_device",
    "pinned_to_device",
    "bytes_to_device",
    "to_host",
    "pinned_to_host",
    "bytes_to_host",
    "on_device",
    "synchronisations",
)
"""What `fake_counts` of the stubs returns."""


class Job(NamedTuple):
    """A model to load, its settings, and steps to run."""

    folder: str
    name: str = ""
    dtype: str = "float16"
    exactness: str = "exact"
    block_size: int = 16
    quantization: str | None = None
    implementation: str = "native"
    num_blocks: int | None = None
    max_model_len: int = 1024
    max_num_seqs: int = 4
    max_device_memory: int | None = None
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Steps; each has (tokens of the step, tokens of the context before them) for each row."""
    num_ahead: int = 0
    """Number of decode steps that are started before the tokens of the step before are known, as in a WorkAgent."""
    draws: bool = False
    """Whether the device draws tokens. The graphs that draw them take seconds to compile, and depend on no model."""
    num_timed: int = 0
    """How often each step is timed."""
    without: str | None = None
    """A setting to leave out: `threads` or `swiglu`; or `decode graph`."""


def main(*jobs: Mapping[str, Any]) -> None:
    """Run jobs with these fields of `Job`. The device settings of the first one apply to all."""
    for job in [Job(**fields) for fields in jobs]:
        sys.stdout.write(f"\n{MARK}{json.dumps({'job': job.name} | run(job))}\n")
        sys.stdout.flush()


def freeze_modules() -> None:
    """Import what the jobs need, and keep it out of the garbage collections of each compilation, which take seconds."""
    import llm_serving.worker.loading  # noqa: F401  imports MindSpore

    gc.freeze()


def run(job: Job) -> dict[str, Any]:
    """Load the model of a job, warm it up and run its steps."""
    import mindspore as ms
    import psutil
    from llm_serving.backends import ascend_cells
    from llm_serving.backends.ascend import AscendBackend
    from llm_serving.backends.cpu import CpuBackend
    from llm_serving.config.schema import ServingConfig
    from llm_serving.config.sections.device import CacheConfig, DeviceConfig, QuantConfig
    from llm_serving.config.sections.model import ModelConfig
    from llm_serving.executor.supervisor import load_settings
    from llm_serving.worker import loading
    from llm_serving.worker.token_graph import TokenGraph

    if job.without == "swiglu":
        AscendBackend.swiglu = CpuBackend.swiglu
    largest_logits = AscendBackend.largest_logits
    if job.without in ("decode graph", "whole mask"):
        AscendBackend.largest_logits = lambda backend: None
    if job.without == "whole mask":
        ascend_cells._MASK_SIZE = 64
    if job.without == "threads":
        ms.runtime.dispatch_threads_num = lambda number: None
    device = DeviceConfig(device_target="Ascend", exactness=job.exactness, max_device_memory=job.max_device_memory)
    model = ModelConfig(
        model_path=Path(job.folder),
        model_dtype=job.dtype,
        max_generate_length=job.max_model_len,
        decode_batch_size=job.max_num_seqs,
        implementation=job.implementation,
    )
    cache = CacheConfig(block_size=job.block_size, num_blocks=job.num_blocks)
    config = ServingConfig(model=model, device=device, pa=cache, quant=QuantConfig(quantization=job.quantization))
    # On the stubs results mean nothing, so the check would let the host draw.
    check_drawing = TokenGraph.check_drawing
    TokenGraph.check_drawing = lambda graph, choose_tokens: None
    settings = load_settings(config, 0)
    configure_once(loading)
    before = psutil.Process().memory_info().rss
    mark("load", job.name)
    runner, notice = loading.load_runner(settings, lambda text: None)
    AscendBackend.largest_logits = largest_logits
    tensors = runner.kv_tensors
    found = {
        "backend": runner.compute_fingerprint.kernels,
        "notice": notice,
        "free": loading.free_npu_memory(),
        "num_blocks": tensors.num_blocks,
        "cache": tensors.num_blocks * tensors.block_bytes,
        "held": psutil.Process().memory_info().rss - before,
    }
    if not job.draws and runner._tokens is not None:
        runner._tokens._drawing = {}
    steps = [results_of(runner, job, index) for index in range(len(job.steps))]
    if job.num_ahead:
        for number, kind in enumerate(("greedy", *(("limited",) if job.draws else ()))):
            start_ahead(runner, job, kind, number * job.num_ahead)
    if job.draws:
        check_drawing(runner._tokens, runner._choose_tokens)
        found["draws_after_check"] = bool(runner._tokens._drawing)
    return found | {"steps": steps}


def results_of(runner: Any, job: Job, index: int) -> dict[str, dict[str, float]]:
    """Run a step of a job repeatedly for each kind of sampling. Return for each kind what the last run copied and
    waited for, and the CPU time in seconds of a run, the least of several means.
    """
    import numpy as np
    from llm_serving.worker.model_inputs import ModelInputs

    rows, block_size = job.steps[index], job.block_size
    query_lens = np.array([tokens for tokens, _ in rows], np.int32)
    context_lens = np.array([tokens + before for tokens, before in rows], np.int32)
    width = -(-int(context_lens.max()) // block_size)
    positions = np.concatenate([np.arange(before, before + tokens, dtype=np.int32) for tokens, before in rows])
    ends = np.cumsum(query_lens, dtype=np.int32)
    inputs = ModelInputs(
        token_ids=np.ones(len(positions), np.int32),
        positions=positions,
        slot_mapping=positions,
        block_tables=np.zeros((len(rows), width), np.int32),
        query_lens=query_lens,
        context_lens=context_lens,
        sample_indices=ends - 1,
    )
    found = {}
    drawing = {} if runner._tokens is None else runner._tokens._drawing
    mark("first", index)
    for name in kinds_of(job, index):
        sampling = sampling_of(name, len(rows))
        step = SimpleNamespace(step=0, sampling=sampling, allowed_follow=False, exports=(), token_ids=inputs.token_ids)
        compute = partial(run_step, runner, step, inputs)
        if runner._tokens is not None:
            runner._tokens._drawing = {} if name.endswith("on the host") else drawing
        compute()
        if not found:
            compute()  # the number of tokens that the first run reads from the one before may differ
        before = read_counts()
        compute()
        found[name] = {each: end - start for each, start, end in zip(COUNTS, before, read_counts(), strict=True)}
        if job.num_timed:
            number = job.num_timed // NUM_MEANS
            times = timeit.repeat(compute, timer=time.process_time, number=number, repeat=NUM_MEANS)
            found[name]["cpu_seconds"] = min(times) / number
    if runner._tokens is not None:
        runner._tokens._drawing = drawing
    mark("end", index)
    return found


def kinds_of(job: Job, index: int) -> tuple[str, ...]:
    """Return the kinds of sampling with which a job runs a step."""
    if job.num_timed:
        drawn = KINDS[:-1] if job.draws else KINDS[:1]
        return (*drawn, *(f"{kind} on the host" for kind in ("drawn", "limited", "nucleus")))
    if index >= NUM_SAMPLED_STEPS:
        return KINDS[:1]
    return KINDS if job.draws else (KINDS[0], KINDS[-1])


def sampling_of(kind: str, num_samples: int) -> Any:
    """Return the sampling parameters of a kind."""
    import numpy as np
    from llm_serving.core.step import SamplingInput

    given: dict[str, Any] = {} if kind == "greedy" else {"temperature": np.ones(num_samples, np.float32)}
    if kind.startswith("limited"):
        given["top_k"] = np.full(num_samples, 40, np.int32)
    if kind.startswith(("limited", "nucleus")):
        given["top_p"] = np.full(num_samples, 0.9, np.float32)
    if kind == "sampled":
        given["num_logprobs"] = np.zeros(num_samples, np.int32)
    return SamplingInput.plain(num_samples, **given)


def run_step(runner: Any, step: Any, inputs: Any) -> None:
    if runner._tokens is None:
        runner._sample(step, inputs, step.token_ids[:0], None)
    else:
        runner._submit(step, inputs, step.token_ids[:0], None).output()


def start_ahead(runner: Any, job: Job, kind: str, context: int) -> None:
    """Decode two requests with a context. Mark in the trace where each step is started and its tokens are awaited."""
    import numpy as np
    from support.step_factories import step_input

    runner._next_step, runner._previous = 0, np.empty(0, np.int32)
    mark(f"ahead {kind}", 0)
    waiting = None
    for index in range(job.num_ahead):
        first, second = (3, 4) if index == 0 else (-1, -2)
        rows = [([first], context + index, [1]), ([second], context + index, [2])]
        mark("start", index)
        started = runner.start(msgspec.structs.replace(step_input(rows, index), sampling=sampling_of(kind, len(rows))))
        if waiting is not None:
            mark("await", index - 1)
            waiting.output()
        waiting = started
    mark(f"ahead {kind}", 1)
    waiting.output()


def configure_once(loading: Any) -> None:
    """Let only the first model of the process configure the device, because MindSpore refuses a second time."""
    configure = loading.configure_device
    if configure is not do_nothing:
        loading.configure_device = lambda device, device_id: (
            configure(device, device_id),
            setattr(loading, "configure_device", do_nothing),
        )


def do_nothing(device: Any, device_id: int) -> None:
    pass


def mark(kind: str, value: Any) -> None:
    """Write a separator to the output and to the trace of the stubs."""
    line = f"\n{MARK} {kind} {value}\n"
    sys.stdout.flush()
    os.write(1, line.encode())
    if "FAKE_TRACE" in os.environ:
        with Path(os.environ["FAKE_TRACE"]).open("a") as file:
            file.write(line)


def read_counts() -> list[int]:
    stubs = ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "lib64", "liball_symbols.so")))
    counts = (ctypes.c_uint64 * len(COUNTS))()
    stubs.fake_counts(counts)
    return list(counts)
