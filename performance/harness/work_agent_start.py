"""Start of a WorkAgent: how long it takes and how much memory, beside the least that is possible."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.figures import Figure, greedy
from llm_serving.config.schema import ServingConfig
from llm_serving.core.process import resident_bytes
from llm_serving.core.request import Request
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.executor.supervisor import WorkAgentProcess, start_work_agent
from llm_serving.models.memory import weight_bytes
from llm_serving.models.spec import ModelSpec
from llm_serving.network.operations import ELEMENT_BYTES
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.tokenizer import Tokenizer

READ_AT_ONCE = 1 << 24
PROCESS_BYTES = 0.6e9
"""Bytes of a WorkAgent beside weights and cache: the interpreter, MindSpore, one tensor in transfer."""
WEIGHTS_ALLOWED = 1.15
"""Peak bytes for each byte of weights."""
ABOVE_WEIGHTS = 1.5e9
"""Bytes of `max_device_memory` beyond the weights, in the test of that limit."""


def start_up(config: ServingConfig) -> list[Figure]:
    """Run test L: a start with uncached files, with cached files, and within a memory limit."""
    return _starts(config) + _within_limit(config)


def _starts(config: ServingConfig) -> list[Figure]:
    assert config.model.model_path is not None
    files = sorted(config.model.model_path.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    figures = []
    for state in ("not cached", "cached"):
        if state == "not cached":
            _forget(files)
        read_s = _read(files)
        if state == "not cached":
            _forget(files)
        start = time.perf_counter()
        with started(config) as agent:
            elapsed = time.perf_counter() - start
            peak, now = _peak_bytes(agent.process.pids), resident_bytes(agent.process.pids)
            allowed = _allowed_bytes(config, agent.loaded.num_blocks)
        figures += [
            Figure("L", f"reading the files, {state}", num_bytes / read_s / 1e9, "GB/s"),
            Figure("L", f"WorkAgent ready, {state}", elapsed, "s", read_s, less_is_better=True),
            Figure("L", f"peak memory, {state}", peak / 1e9, "GB", allowed / 1e9, less_is_better=True),
            Figure("L", f"memory when ready, {state}", now / 1e9, "GB"),
        ]
    return figures


def _within_limit(config: ServingConfig) -> list[Figure]:
    """Measure the peak memory under `max_device_memory` if that limit alone decides the size of the KV cache.

    The peak is that of the largest step, with as many tokens and rows as the configuration allows, plus the blocks that
    were not used yet.
    """
    limit = int(_weight_bytes(config) + ABOVE_WEIGHTS)
    device = replace(config.device, max_device_memory=limit)
    config = replace(config, device=device, pa=replace(config.pa, num_blocks=None))
    assert config.model.model_path is not None
    with started(config) as agent:
        executor, metrics = RemoteExecutor(agent.channel, agent.buffers), Metrics()
        tokenizer = Tokenizer.load(config.model.model_path, config.model.tokenizer_path)
        engine = build_engine(config, agent.loaded.num_blocks, executor, tokenizer, metrics, lambda pieces: None)
        num_rows = config.model.decode_batch_size
        prompt = [1] * max(1, config.scheduler.max_prefill_tokens // num_rows)
        for row in range(num_rows):
            engine.submit(Request(f"row {row}", [row + 3, *prompt[1:]], greedy(3)))
        while engine.has_unfinished_requests:
            engine.step()
        pool = engine.scheduler.blocks.pool
        unused = (pool.num_blocks - pool.num_touched_blocks) * agent.loaded.block_bytes
        peak = _peak_bytes(agent.process.pids) + unused
    return [
        Figure("L", "blocks within max_device_memory", agent.loaded.num_blocks, ""),
        Figure("L", "peak memory within it", peak / 1e9, "GB", limit / 1e9, less_is_better=True),
    ]


@contextmanager
def started(config: ServingConfig) -> Iterator[WorkAgentProcess]:
    """Start a WorkAgent without a server; stop it at the end of the block."""
    last, start = "", time.perf_counter()

    def on_progress(text: str) -> None:
        nonlocal last, start
        now = time.perf_counter()
        print(f"     {last or 'starting the process'}: {now - start:.1f} s", flush=True)
        last, start = text.partition(": ")[2], now

    agent = start_work_agent(config, 0, on_progress)
    try:
        on_progress("")
        yield agent
    finally:
        agent.stop()


def _allowed_bytes(config: ServingConfig, num_blocks: int) -> float:
    size = ELEMENT_BYTES[config.model.model_dtype]
    per_token = _spec(config).kv_bytes_per_token(size, int8=config.quant.has_int8_kv_cache)
    cache = num_blocks * config.pa.block_size * per_token
    return WEIGHTS_ALLOWED * _weight_bytes(config) + cache + PROCESS_BYTES


def _weight_bytes(config: ServingConfig) -> int:
    return weight_bytes(_spec(config), ELEMENT_BYTES[config.model.model_dtype], config.quant.weights)


def _spec(config: ServingConfig) -> ModelSpec:
    assert config.model.model_path is not None
    return ModelSpec.from_folder(config.model.model_path)


def _peak_bytes(pids: list[int]) -> int:
    """Return the peak resident bytes of processes, pages of mapped files included."""
    statuses = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in pids]
    return sum(int(line.split()[1]) * 1024 for lines in statuses for line in lines if line.startswith("VmHWM:"))


def _forget(files: list[Path]) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: list[Path]) -> float:
    """Return the seconds to read all files once."""
    buffer = bytearray(READ_AT_ONCE)
    start = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - start
