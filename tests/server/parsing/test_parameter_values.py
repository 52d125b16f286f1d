"""Accepted parameter values can be computed: none ends in an internal error."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.sampling_params import RULES, Real, SamplingParams, Whole, as_float32
from llm_serving.errors import RequestError
from support.engine_harness import Harness
from support.fake_runner import SamplingRunner
from support.fakes import FakeEngine
from support.server_client import error_of, post

_names = (f"edge-{number}" for number in itertools.count())
SMALLEST = 2.0**-149
"""The smallest positive single-precision number; half of it rounds to 0."""
EDGES = [
    0.0, -0.0, 1e-300, 1e-46, SMALLEST / 2, SMALLEST, 1e-40, 2.0**-126, 1e-38, 1e-30, 1e-9, 0.0099, 0.01, 0.5, 0.999,
    1 - 2.0**-25, 1 - 2.0**-24, 1 - 2.0**-53, 1.0, 1 + 2.0**-52, 1 + 2.0**-23, 1.5, 2.0, 2.0000001, 99.9999999, 100.0,
    100.000001, 1e5, 2.0**24 + 1, 3.4028235677973366e38, 3.5e38, 1e300, -1e-46, -1e-38, -2.0, -2.0000001, -100.0, -1e39,
]  # fmt: skip
WHOLE_EDGES = [-(2**63), -2, -1, 0, 1, 2, 3, 7, 20, 21, 999, 1000, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, 2**64 - 1]
REALS = st.sampled_from(EDGES) | st.floats(allow_nan=False, allow_infinity=False, width=32) | st.sampled_from([0, 1, 2])
WHOLES = st.sampled_from(WHOLE_EDGES)
BIASES = st.dictionaries(st.integers(0, 40).map(str), st.sampled_from(EDGES), max_size=4)
IDS = st.lists(st.integers(0, 60), max_size=4)
STOPS = st.lists(st.text(min_size=1, max_size=3), max_size=2)
FIELDS = {
    name: WHOLES if isinstance(rule, Whole) else REALS
    for name, rule in RULES.items()
    if isinstance(rule, Whole | Real) and name not in ("max_tokens", "logprobs")
} | {
    "max_tokens": st.integers(1, 4) | WHOLES,
    "logprobs": st.none() | st.integers(0, 20),
    "logit_bias": BIASES,
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "stop": STOPS,
}
BODIES = {
    "/v1/completions": lambda fields: {"prompt": [7, 8, 9], **fields},
    "/v1/chat/completions": lambda fields: {
        "messages": [{"role": "user", "content": "x"}], **fields, "logprobs": None,
    },
    "/generate": lambda fields: {"inputs": "x", "parameters": fields},
    "/models/demo": lambda fields: {"inputs": "x", "parameters": fields},
}  # fmt: skip


def given_fields(**optional):
    return st.fixed_dictionaries({}, optional=FIELDS | optional)


def compute(sampling, scale):
    """Return the last output of a request that a real sampler samples, and its error."""
    harness = Harness(runner=SamplingRunner)
    harness.runner.scale = scale
    request = Request(next(_names), [7, 8, 9], sampling, stop_token_ids=frozenset({2, *sampling.stop_token_ids}))
    harness.engine.submit(request)
    harness.run()
    return harness.last(request.request_id)


@pytest.mark.parametrize("path", BODIES)
@given(
    fields=given_fields(max_new_tokens=st.integers(1, 4) | WHOLES, top_n_tokens=st.integers(0, 20)),
    scale=st.sampled_from([0.0, 1.0, 1e30, 1e37, -1e37]),
)
@settings(max_examples=50)
def test_accepted_parameters_are_computable(path, fields, scale):
    engine = FakeEngine()
    status = post(engine, path, BODIES[path]({"max_tokens": 3, "max_new_tokens": 3, **fields})).status_code
    assert status in (200, 400, 422)
    assert status == 200 or not engine.submitted
    for submitted in engine.submitted:
        sampling = submitted.sampling
        if sampling.max_tokens <= 8:
            assert compute(sampling, scale).finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@given(fields=given_fields(), extreme=st.sampled_from([10**400, -(10**400), math.nan, math.inf, -math.inf, True, "1"]))
@settings(max_examples=100)
def test_python_sampling_params_are_checked(fields, extreme):
    name = next(iter(fields), "top_p")
    for values in (fields, {**fields, name: extreme}):
        try:
            sampling = SamplingParams(**values)
        except (RequestError, TypeError, ValueError):
            continue
        for each, rule in RULES.items():
            if isinstance(rule, Real):
                used = getattr(sampling, each)
                assert as_float32(used) == used
                assert rule.holds(used)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("top_p", 1e-46, "must be above 0.0 and at most 1.0 in single precision, where 1e-46 is 0.0"),
        ("repetition_penalty", 1e-38, "must be a number from 0.01 to 100.0"),
        ("repetition_penalty", 100.000001, None),
        ("temperature", 3.5e38, "must be a number from 0.0 to 100.0"),
    ],
)
def test_values_are_checked_in_single_precision(field, value, rule):
    response = post(FakeEngine(), "/v1/completions", {"prompt": "x", field: value})
    if rule is None:
        assert response.status_code == 200
    else:
        assert error_of(response)["message"] == f"`{field}` {rule}. Given: {value}"


def test_temperature_that_rounds_to_zero_is_greedy():
    assert SamplingParams(temperature=1e-46).greedy
    assert post(FakeEngine(), "/generate", {"inputs": "x", "parameters": {"temperature": 1e-46}}).status_code == 422
