import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test.metrics import (
    Distribution,
    ExactMatch,
    RequestRecord,
    ServiceLevel,
    exact_match,
    exact_match_by_task,
    percentile,
    summarize,
)


def make_record(**fields: Any) -> RequestRecord:
    """Return a request that is due at 1 s, with four tokens at 1.5, 1.6, 1.8 and 2.0 s, complete at 2.0 s."""
    defaults = {
        "index": 0,
        "prompt": "p",
        "task": "",
        "expected": None,
        "due_s": 1.0,
        "sent_s": 1.0,
        "end_s": 2.0,
        "token_times_s": (1.5, 1.6, 1.8, 2.0),
        "num_output_tokens": 4,
        "text": "one two three four",
    }
    return RequestRecord(**(defaults | fields))


def test_request_times_start_at_its_due_time():
    record = make_record(sent_s=1.2)
    assert record.ttft_s == 0.5
    assert record.latency_s == 1.0
    assert record.tpot_s == pytest.approx(0.5 / 3)
    assert record.itl_s == pytest.approx([0.1, 0.2, 0.2])
    assert record.lateness_s == pytest.approx(0.2)


def test_tpot_is_per_token_not_per_event():
    assert make_record(num_output_tokens=11).tpot_s == pytest.approx(0.05)


def test_tpot_of_one_token_is_nan_and_ttft_without_tokens_is_the_latency():
    assert make_record(token_times_s=(1.5,), num_output_tokens=1).tpot_s is None
    assert make_record(token_times_s=(), num_output_tokens=0).ttft_s == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_equals_numpy_linear_interpolation(values, q):
    assert percentile(sorted(values), q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-6)


def test_percentile_interpolates_between_ranks():
    assert percentile([10, 20, 30, 40], 50) == 25
    assert percentile([10, 20, 30, 40], 0) == 10
    assert percentile([10, 20, 30, 40], 100) == 40
    assert percentile([7], 99) == 7


def test_statistics_of_no_values_are_nan():
    assert all(math.isnan(value) for value in vars(Distribution.of([])).values())


def test_exact_match_ignores_outer_white_space_and_requests_without_an_expected_answer():
    records = [
        make_record(text=" 42\n", expected="42"),
        make_record(text="4 2", expected="42"),
        make_record(text="anything", expected=None),
    ]
    assert exact_match(records) == ExactMatch(1, 2)
    assert exact_match(records).rate == 0.5


def test_a_failed_request_is_not_an_exact_match():
    assert exact_match([make_record(text="", expected="", error="refused")]) == ExactMatch(0, 1)


def test_exact_match_by_task():
    records = [
        make_record(task="sums", text="4", expected="4"),
        make_record(task="sums", text="5", expected="4"),
        make_record(task="facts", text="Rome", expected="Rome"),
    ]
    assert exact_match_by_task(records) == {"facts": ExactMatch(1, 1), "sums": ExactMatch(1, 2)}


def test_service_level_counts_requests_within_their_targets():
    record = make_record()  # TTFT 500 ms, TPOT 166.7 ms
    assert ServiceLevel().met_by(record)
    assert ServiceLevel(ttft_ms=500, tpot_ms=167).met_by(record)
    assert not ServiceLevel(ttft_ms=499).met_by(record)
    assert not ServiceLevel(tpot_ms=166).met_by(record)
    assert not ServiceLevel().met_by(make_record(error="refused"))
    assert ServiceLevel(tpot_ms=1).met_by(make_record(token_times_s=(1.5,), num_output_tokens=1))


def test_summary_counts_failures_and_computes_percentiles_of_answers():
    records = [
        make_record(due_s=0.0, end_s=2.0, sent_s=0.003),
        make_record(),
        make_record(due_s=2.0, end_s=5.0, error="broken", token_times_s=(), num_output_tokens=0, num_retries=2),
    ]
    summary = summarize(records, ServiceLevel(ttft_ms=600))
    assert (summary.num_requests, summary.num_failed, summary.num_retries) == (3, 1, 2)
    assert summary.span_s == 5.0
    assert summary.ttft_ms == Distribution(1000.0, 1000.0, 1490.0)  # 500 and 1500
    assert summary.latency_ms == Distribution(1500.0, 1500.0, 1990.0)  # 1000 and 2000
    assert summary.num_output_tokens == 8
    assert summary.output_tokens_per_s == 1.6
    assert summary.requests_per_s == 0.4
    assert summary.goodput_per_s == 0.2
    assert summary.max_lateness_ms == pytest.approx(3.0)


def test_summary_of_failures_only_has_no_times():
    summary = summarize([make_record(error="broken")], ServiceLevel())
    assert summary.num_failed == 1
    assert summary.output_tokens_per_s == summary.goodput_per_s == 0
    assert math.isnan(summary.ttft_ms.p99)
