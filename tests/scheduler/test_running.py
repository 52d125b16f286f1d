"""RunningSnapshot agrees with the properties of requests."""

from hypothesis import given
from hypothesis import strategies as st
from llm_serving.core.request import Request
from llm_serving.scheduler.running import RunningSnapshot
from support.factories import create_request

requests = st.builds(
    lambda prompt, output, in_flight, computed, last, paused, waits: _request(
        prompt, output, in_flight, computed, last, paused=paused, waits=waits
    ),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 8),
    st.integers(-1, 5),
    st.booleans(),
    st.booleans(),
)


def _request(
    prompt: int, output: int, in_flight: int, computed: int, last: int, *, paused: bool, waits: bool
) -> Request:
    request = create_request(prompt, max_tokens=4)
    request.output_token_ids = [7] * output
    request.num_tokens_in_flight = in_flight
    request.num_computed_tokens = min(computed, request.num_tokens)
    request.last_scheduled_step = last
    request.paused, request.needs_known_output = paused, waits
    return request


@given(st.lists(requests, max_size=6))
def test_running_snapshot_agrees_with_the_properties_of_requests(requests):
    running = RunningSnapshot(requests)
    decoding = [each for each in requests if each.is_decoding and not each.paused]
    can_decode = [
        each
        for each in decoding
        if each.num_output_tokens < each.sampling.max_tokens
        and not (each.needs_known_output and each.num_tokens_in_flight)
    ]
    assert running.num_decoding == len(decoding)
    assert running.decoding == can_decode
    assert running.prefilling == [each for each in requests if each.num_uncomputed_tokens and not each.is_decoding]
    steps = [each.last_scheduled_step for each in can_decode]
    assert running.least_scheduled_step == (min(steps) if steps else None)
