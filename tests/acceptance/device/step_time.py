"""Bound the time of a step by the device's memory bandwidth and arithmetic peak (its roofline)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from acceptance.device.outcome import Outcome, table
from acceptance.device.server import Answer, Server, ask
from llm_serving.config.schema import ServingConfig
from llm_serving.models.memory import weight_bytes
from llm_serving.models.spec import ModelSpec

TITLE = "Time of a step"
FACTOR = 3.0
"""Maximum time of a step as a multiple of its time at the device's limits, not counting `HOST_S`."""
HOST_S = 0.03
"""Time that the host may add to a step."""
NUM_TOKENS = 32
MAX_ROWS = 32
PROMPT_TOKENS = 1024
REPEATS = 3

Ask = Callable[..., list[Answer]]


@dataclass(frozen=True)
class Device:
    """Limits of a device.

    Attributes:
        name: Name in the report.
        bandwidth: Memory bandwidth in bytes per second.
        peak: Maximum operations per second of 16-bit products.
    """

    name: str
    bandwidth: float
    peak: float


DEVICES = tuple(
    Device(name, gigabytes * 1e9, tera * 1e12)
    for name, gigabytes, tera in (
        ("910B4", 800, 280),
        ("910B3", 1600, 313),
        ("910B2", 1600, 376),
        ("910B1", 1600, 400),
        ("910_93", 1600, 376),
    )
)
"""Known devices. The name is a part of what `npu-smi info` shows.

The values are approximate: Huawei's data sheets were not at hand, and public descriptions differ. `--bandwidth` and
`--peak` of the acceptance replace them.
"""


def device_of(names: str) -> Device:
    """Return the device in the output of `npu-smi info`; the slowest one if none is known."""
    found = [each for each in DEVICES if each.name.lower() in names.lower()]
    return found[0] if found else Device("unknown, as the slowest known one", DEVICES[0].bandwidth, DEVICES[0].peak)


def measured_host() -> Device:
    """Return the limits of this machine's processor, as NumPy reaches them."""
    source, target = np.ones(2**25, np.float32), np.empty(2**25, np.float32)
    matrix = np.ones((1024, 1024), np.float32)
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(REPEATS))
    product = min(_seconds(lambda: matrix @ matrix) for _ in range(REPEATS))
    return Device("this processor, measured", 2 * source.nbytes / copy, 2 * 1024**3 / product)


def _seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def limit_s(spec: ModelSpec, config: ServingConfig, device: Device, rows: int, context: int, tokens: int) -> float:
    """Return the maximum time of a step.

    Args:
        spec: The model.
        config: How it is served.
        device: The device of each rank.
        rows: Requests of the step.
        context: Tokens of each request that the step reads from the KV cache.
        tokens: Tokens that the step computes, all rows together.
    """
    num_bytes = weight_bytes(spec, 2, config.quant.weights) + rows * context * spec.kv_bytes_per_token(2)
    seconds = max(num_bytes / device.bandwidth, 2 * spec.num_weight_elements * tokens / device.peak)
    return FACTOR * seconds / config.cluster.tensor_parallel + HOST_S


def examine(server: Server, spec: ModelSpec, config: ServingConfig, device: Device, ask: Ask = ask) -> Outcome:
    """Measure decode steps of one request and of many, and a prompt, and compare them with their limits.

    The best of several measurements counts.

    Raises:
        PartError: The server cannot answer.
    """
    length = min(PROMPT_TOKENS, server.longest() // 2)
    draw = random.Random(0)

    def body(prompt_tokens: int, max_tokens: int) -> dict[str, object]:
        prompt = draw.choices(range(spec.vocab_size // 8, spec.vocab_size), k=prompt_tokens)
        return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "seed": 1}

    ask(server.url, [body(16, 2)])
    measured = []
    for rows in dict.fromkeys((1, min(MAX_ROWS, config.model.decode_batch_size))):
        context = 64 + NUM_TOKENS
        found = min(step_s(ask(server.url, [body(64, NUM_TOKENS) for _ in range(rows)])) for _ in range(REPEATS))
        measured.append((f"decode, {rows} requests", found, limit_s(spec, config, device, rows, context, rows)))
    found = min(ask(server.url, [body(length, 1)])[0].arrivals[0] for _ in range(REPEATS))
    steps = -(-length // config.scheduler.max_prefill_tokens)
    limit = limit_s(spec, config, device, 1, length, length) + (steps - 1) * HOST_S
    measured.append((f"prompt of {length} tokens", found, limit))
    return judge(measured, device)


def step_s(answers: list[Answer]) -> float:
    """Return the mean seconds of a step in which all requests decoded. The tokens of a step arrive in one event."""
    start, end = max(each.arrivals[0] for each in answers), min(each.arrivals[-1] for each in answers)
    if end <= start:  # one ended before another began
        return float("inf")
    return (end - start) / max(len({at for at in each.arrivals if start < at <= end}) for each in answers)


def judge(measured: list[tuple[str, float, float]], device: Device) -> Outcome:
    """Return the outcome of (what, seconds, limit in seconds)."""
    faults = [
        f"{what}: a step takes {found * 1e3:.1f} ms; {limit * 1e3:.1f} ms are allowed"
        for what, found, limit in measured
        if not found <= limit
    ]
    lines = [
        f"Device: {device.name}, {device.bandwidth / 1e9:.0f} GB/s, {device.peak / 1e12:.1f} TFLOPS. Allowed: "
        f"{FACTOR:g} times the time at these limits, and {HOST_S * 1e3:.0f} ms for the host.",
        "",
        *table(
            ("step", "ms", "allowed, ms"),
            [(what, f"{found * 1e3:.2f}", f"{limit * 1e3:.2f}") for what, found, limit in measured],
        ),
    ]
    return Outcome(TITLE, lines, faults)
