"""The same requests one by one and all at once, on servers of every configuration: the same bytes everywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import pytest
from support.server_process import Server, metric, start_server

pytestmark = pytest.mark.end_to_end

TASKS = (
    "Count from 1 to 9.",
    "Add 17 and 25.",
    "Reverse the word lamp.",
    "Name the days of the week.",
    "Sort these words alphabetically: sail rocket beach.",
)
TIGHT = {"pa_config.num_blocks": 40, "model_config.decode_batch_size": 12}
"""Settings with too few blocks and running slots, so that some requests are preempted."""
ALONE = "mixed, swapping, no prefix cache"
"""The server that also computes the reference answers, one at a time and without prefix cache."""
MAX_ROUNDS = 6
"""Maximum number of times that all requests are sent: on a busy machine all may find room the first time."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "decode first, chunks of 16": {
        "scheduler_config.policy": "decode_first",
        "scheduler_config.max_prefill_tokens": 16,
        "device_config.num_threads": 1,
        **TIGHT,
    },
    ALONE: {
        "scheduler_config.policy": "mixed",
        "scheduler_config.max_prefill_tokens": 64,
        "scheduler_config.preemption_mode": "swap",
        "scheduler_config.prefix_caching": False,
        "pa_config.num_swap_blocks": 64,
        "device_config.num_threads": 1,
        **TIGHT,
    },
    "throughput, separate steps, the graphs of Ascend": {
        "device_config.kernels": "primitives",
        "device_config.exactness": "fast",
        "scheduler_config.policy": "throughput",
        "scheduler_config.enable_mixed_chunk": False,
        "scheduler_config.max_prefill_tokens": 128,
    },
    "first come, first served, in static batches, one step at a time": {
        "scheduler_config.policy": "fcfs",
        "model_config.batching_strategy": "static",
        "model_config.decode_batch_size": 8,
        "device_config.num_threads": 1,
        "scheduler_config.async_scheduling": False,
    },
}
"""Settings by name. Prefill first is tested by test_exact_under_load.py, and with swapping by test_kill_matrix.py."""


def requests(*, static: bool) -> list[dict[str, Any]]:
    """Return requests of every class: greedy, sampled, filtered, penalized, several choices, beams; short and long."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3, "logprobs": 2},
        {"temperature": 1.1, "seed": 4, "top_p": 0.9, "top_k": 40, "n": 3},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0, "use_beam_search": True, "n": 3},
        {"temperature": 0.7, "seed": 6, "min_p": 0.05, "best_of": 3, "n": 1},
    ]
    classes = ("interactive", "standard", "batch")
    made = []
    for index in range(30):
        kind = kinds[index % len(kinds)]
        # beams need additional running slots, which a static batch does not have
        if static and "use_beam_search" in kind:
            kind = {"temperature": 0, "logprobs": 5}
        prompt = " ".join([TASKS[index % len(TASKS)]] * (1 + index % 7))
        made.append(
            {
                "prompt": prompt,
                "max_tokens": 10 + index,
                "ignore_eos": True,
                "priority_class": classes[index % 3],
                **kind,
            }
        )
    return made


async def answer(client: httpx.AsyncClient, request: dict[str, Any]) -> str:
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return json.dumps(response.json()["choices"], sort_keys=True)


def arguments(settings: dict[str, Any]) -> list[str]:
    return [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]


def all_at_once(server: Server, *, static: bool) -> tuple[list[str], float]:
    """Return the answers to all requests at once, and the number of preemptions meanwhile."""

    async def run() -> tuple[list[str], float]:
        async with asyncio.timeout(300), server.client() as client:
            answers = await asyncio.gather(*(answer(client, each) for each in requests(static=static)))
            assert await metric(client, "llm_serving:bound_violations_total") == 0
            assert await metric(client, "llm_serving:audit_mismatch_total") == 0
            return list(answers), await metric(client, "vllm:num_preemptions_total")

    return asyncio.run(run())


@contextmanager
def serving(name: str) -> Iterator[Server]:
    server = start_server(*arguments(CONFIGURATIONS[name]))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def first() -> Iterator[Server]:
    with serving(ALONE) as server:
        yield server


@pytest.fixture(scope="module")
def reference(first: Server) -> dict[bool, list[str]]:
    """Return the answer to each request when no other request runs."""
    requested = {static: requests(static=static) for static in (False, True)}

    async def run() -> dict[bool, list[str]]:
        given: dict[str, str] = {}
        async with asyncio.timeout(300), first.client() as client:
            for each in itertools.chain.from_iterable(requested.values()):
                if repr(each) not in given:
                    given[repr(each)] = await answer(client, each)
        return {static: [given[repr(each)] for each in asked] for static, asked in requested.items()}

    return asyncio.run(run())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_answers_of_every_configuration_equal_the_reference_answers(
    name: str, first: Server, reference: dict[bool, list[str]]
) -> None:
    settings = CONFIGURATIONS[name]
    static = settings.get("model_config.batching_strategy") == "static"
    is_tight = TIGHT.items() <= settings.items()
    with nullcontext(first) if name == ALONE else serving(name) as server:
        for _ in range(MAX_ROUNDS if is_tight else 1):
            together, num_preemptions = all_at_once(server, static=static)
            for request, given, expected in zip(requests(static=static), together, reference[static], strict=True):
                assert given == expected, request
            if num_preemptions:
                break
    assert (num_preemptions > 0) == is_tight
