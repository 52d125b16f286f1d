"""A prompt longer than a step, alone and beside others."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.scheduler import Schedule
from support.factories import create_request, create_scheduler, rows, run_step


def lens(schedule: Schedule | None) -> dict[str, int]:
    return {name: query_len for name, _, query_len, _ in rows(schedule)}


def steps(count: int, *sizes: int, **limits: Any) -> list[dict[str, int]]:
    """Return the tokens of each prompt in each step; prompts are named a, b, ..."""
    scheduler = create_scheduler(**{"max_num_batched_tokens": 12, **limits})
    for name, size in zip("abcdef", sizes, strict=False):
        scheduler.add(create_request(size, request_id=name, max_tokens=1))
    return [lens(run_step(scheduler)) for _ in range(count)]


def test_long_prompt_alone_fills_the_step() -> None:
    assert steps(2, 30, max_long_prefill_tokens=4) == [{"a": 12}, {"a": 12}]


def test_long_prompt_is_capped_beside_short_ones() -> None:
    assert steps(1, 30, 4, 3, max_long_prefill_tokens=4) == [{"a": 5, "b": 4, "c": 3}]


def test_rest_of_the_budget_goes_to_the_first_long_prompt() -> None:
    assert steps(1, 30, 3, max_long_prefill_tokens=4) == [{"a": 9, "b": 3}]
    assert steps(1, 30, 30, max_long_prefill_tokens=4) == [{"a": 8, "b": 4}]


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    first = steps(2, 100, 6, max_long_prefill_tokens=6)
    assert first == [{"a": 6, "b": 6}, {"a": 12}]


def test_prompts_run_one_after_the_other_without_the_cap() -> None:
    assert steps(3, 14, 14) == [{"a": 12}, {"a": 2, "b": 10}, {"b": 4}]


def test_long_prefill_cap_keeps_the_limit_on_prompts_in_a_step() -> None:
    assert steps(1, 30, 30, 30, max_long_prefill_tokens=2, max_prefill_seqs=2) == [{"a": 10, "b": 2}]


def test_running_long_prompt_is_capped_for_later_prompts() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=12, max_long_prefill_tokens=4)
    scheduler.add(create_request(60, request_id="long"))
    assert lens(run_step(scheduler)) == {"long": 12}
    scheduler.add(create_request(8, request_id="short"))
    assert lens(run_step(scheduler)) == {"long": 8, "short": 4}
    assert lens(run_step(scheduler)) == {"long": 8, "short": 4}


@pytest.mark.parametrize("cap", [None, 1, 5])
def test_only_the_last_chunk_samples(cap: int | None) -> None:
    scheduler = create_scheduler(max_num_batched_tokens=8, max_long_prefill_tokens=cap)
    for name in "ab":
        scheduler.add(create_request(20, request_id=name, max_tokens=1))
    samples = [row for _ in range(5) for row in rows(run_step(scheduler)) if row[3]]
    assert [(name, start + size) for name, start, size, _ in samples] == [("a", 20), ("b", 20)]
