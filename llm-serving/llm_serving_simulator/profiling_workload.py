"""The workload of `llm-serving profile`: phases that together give a server steps of every shape."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from llm_serving_simulator.workload import FIRST_TOKEN, Workload, WorkloadRequest, WorkloadStream

MAX_REQUESTS: Final = 2048
"""Requests of a phase; no server answers more in its time."""
NUM_ROUNDS: Final = 2
"""Number of rounds of all phases, so that a slow minute of the machine affects more than one kind of steps."""
SECONDS_PER_CONCURRENCY: Final = 2.5
PAUSED_RATE: Final = 2.5
"""Requests per second of the phase with pauses."""
PAUSED_S: Final = 5.0
MANY_CLIENTS: Final = 16
"""From this many clients on, prompts take most of a phase, so a phase of short prompts follows."""
SHORT_PROMPT: Final = 4
DECODING_S: Final = 2.0
MAX_ANSWER: Final = 128
REPEATING_CLIENTS: Final = (1, 2, 4, 8)
"""Numbers of clients that repeat the same requests, so that n-gram lookup proposes draft tokens."""
REPEATING_S: Final = 1.25
REPEATED_ANSWER: Final = 96
LARGER_S: Final = 4.0


class ProfilingPhase(NamedTuple):
    """A workload that runs for some seconds."""

    name: str
    seconds: float
    workload: Workload


class ServerLimits(NamedTuple):
    """The limits of the server that the phases are made for."""

    num_slots: int
    max_len: int
    """Tokens of a prompt and its answer."""
    num_cached: int
    """Tokens in the KV cache."""
    vocab_size: int

    def tokens_each(self, count: int) -> int:
        """Return how many tokens each of `count` concurrent requests may have."""
        return max(2, min(self.max_len, self.num_cached // count) - 1)


Span = tuple[int, int]
"""Smallest and largest number of tokens."""


def phases(limits: ServerLimits, seed: int = 1, scale: float = 1.0) -> list[ProfilingPhase]:
    """Return the phases in their order.

    In each round: one request after the other; the same with pauses; 2, 4, ... clients up to the number of slots, with
    mixed lengths, and for many clients with short prompts, so that steps decode only; long contexts; more prompts than
    slots; and few clients that repeat the same requests.

    Args:
        limits: Limits of the server.
        seed: Seed of lengths and tokens.
        scale: Factor of the duration of each phase.
    """
    rng = random.Random(seed)
    found = [_closed_loop(rng, limits, 4, (16, 64), (8, 16), scale, "warming up")]
    for _ in range(NUM_ROUNDS):
        found += _round(rng, limits, scale)
    return found


def larger_phases(
    limits: ServerLimits, num_tokens: int, base: ServerLimits, base_tokens: int, scale: float = 1.0
) -> list[ProfilingPhase]:
    """Return phases whose steps are larger than those of `phases`, for a server with higher limits.

    Args:
        limits: Limits of that server.
        num_tokens: Its token budget.
        base: Limits of the server that `phases` were played on.
        base_tokens: Token budget of that server.
        scale: Factor of the duration of each phase.
    """
    rng, most, seconds = random.Random(base_tokens), max(4, limits.max_len - 2), LARGER_S * scale
    low, high = max(2, most // 4), max(3, most // 2)
    found = [_closed_loop(rng, limits, 4, (16, 64), (8, 16), scale, "warming up for larger steps")]
    count = limits.num_slots
    if count > base.num_slots:
        room = max(8, min(most, limits.num_cached // count))
        answer = 2, max(3, room // 3)
        found.append(_closed_loop(rng, limits, count, (4, max(5, room // 2)), answer, seconds, f"{count} clients"))
        found.append(_decoding(rng, limits, count, seconds))
    few = max(1, min(count, limits.num_cached // limits.max_len))
    prompt, answer = (most // 2, most * 3 // 4), (16, max(17, most // 8))
    found.append(_closed_loop(rng, limits, few, prompt, answer, seconds, "full cache"))
    size = 2 * base_tokens
    while size < 2 * num_tokens:
        size = min(size, num_tokens)
        # A step answers half of the clients while the others wait for the next one.
        clients = max(2, min(2 * count, round(2 * size / ((low + high) / 2))))
        name = f"prompts, {size} tokens a step"
        found.append(_closed_loop(rng, limits, clients, (low, high), (1, 2), seconds, name))
        size *= 2
    return found


def _round(rng: random.Random, limits: ServerLimits, scale: float) -> Iterator[ProfilingPhase]:
    due = itertools.accumulate(rng.expovariate(PAUSED_RATE) for _ in range(MAX_REQUESTS))
    most = max(2, limits.max_len - 2)
    yield _closed_loop(rng, limits, 1, (4, most // 2), (4, 24), 2.0 * scale, "one request at a time")
    paused = itertools.islice(_requests(rng, "seldom", limits, (4, most // 4), (4, 16)), MAX_REQUESTS)
    requests = [replace(each, due_s=time) for each, time in zip(paused, due, strict=True)]
    workload = Workload("seldom", (WorkloadStream("seldom", requests),), 0, limits.vocab_size)
    yield ProfilingPhase("requests with pauses", PAUSED_S * scale, workload)
    counts = [2**power for power in range(1, 1 + max(0, math.ceil(math.log2(limits.num_slots))))]
    for count in (min(count, limits.num_slots) for count in counts):
        room = max(8, min(most, limits.num_cached // count))
        answer = max(2, min(MAX_ANSWER, room // 3))
        prompt = 4, max(5, min(room - answer - 1, most // 2))
        seconds = SECONDS_PER_CONCURRENCY * scale
        yield _closed_loop(rng, limits, count, prompt, (2, answer), seconds, f"{count} clients")
        if count >= MANY_CLIENTS:
            yield _decoding(rng, limits, count, DECODING_S * scale)
    few = max(1, min(limits.num_slots, 8, limits.num_cached // limits.max_len))
    prompt = most // 2, max(3, most * 3 // 4)
    yield _closed_loop(rng, limits, few, prompt, (16, max(17, most // 8)), 3.0 * scale, "long contexts")
    yield _closed_loop(rng, limits, 2 * limits.num_slots, (4, max(5, most // 2)), (1, 2), 3.0 * scale, "prompts")
    for count in (count for count in REPEATING_CLIENTS if count <= limits.num_slots):
        yield _repeating(rng, limits, count, REPEATING_S * scale)


def _decoding(rng: random.Random, limits: ServerLimits, count: int, seconds: float) -> ProfilingPhase:
    """Return a phase of clients whose prompts fit into one step and whose answers end together."""
    room = limits.tokens_each(count)
    prompt = max(1, min(SHORT_PROMPT, room // 2))
    answer = max(1, min(MAX_ANSWER, room - prompt))
    name = f"{count} clients, short prompts"
    return _closed_loop(rng, limits, count, (prompt, prompt), (answer, answer), seconds, name)


def _closed_loop(
    rng: random.Random, limits: ServerLimits, count: int, prompt: Span, answer: Span, seconds: float, name: str
) -> ProfilingPhase:
    requests = list(itertools.islice(_requests(rng, name, limits, prompt, answer), MAX_REQUESTS))
    return _phase(requests, limits, count, seconds, name)


def _repeating(rng: random.Random, limits: ServerLimits, count: int, seconds: float) -> ProfilingPhase:
    """Return a phase of clients that repeat as many requests as there are clients."""
    room = limits.tokens_each(count)
    answer, name = min(REPEATED_ANSWER, max(1, room // 2)), f"{count} clients, the same again"
    few = list(itertools.islice(_requests(rng, name, limits, (4, min(32, room // 2 + 3)), (answer, answer)), count))
    return _phase([few[number % count] for number in range(MAX_REQUESTS)], limits, count, seconds, name)


def _phase(
    requests: list[WorkloadRequest], limits: ServerLimits, count: int, seconds: float, name: str
) -> ProfilingPhase:
    return ProfilingPhase(name, seconds, Workload(name, (WorkloadStream(name, requests, count),), 0, limits.vocab_size))


def _requests(
    rng: random.Random, name: str, limits: ServerLimits, prompt: Span, answer: Span
) -> Iterator[WorkloadRequest]:
    """Yield requests whose lengths are uniform in their logarithm."""
    while True:
        num_prompt = _length(rng, *prompt)
        num_answer = max(1, min(_length(rng, *answer), limits.max_len - num_prompt))
        tokens = rng.choices(range(FIRST_TOKEN, limits.vocab_size), k=num_prompt)
        yield WorkloadRequest(name, 0.0, tokens, num_answer, num_answer, ignore_eos=True)


def _length(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))
