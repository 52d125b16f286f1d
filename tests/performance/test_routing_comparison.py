"""The comparison of routing rules: its step times are the published ones, and caches are found where they are."""

import pytest
from llm_serving.core.choices import RoutingName
from llm_serving.whatif.step_shape import StepShape
from routing_comparison import LOADS, PREFILL_MS, cached_share, load, play, published_profile


def test_published_times_are_met() -> None:
    step = published_profile().step
    for tokens, ms in PREFILL_MS:
        shape = StepShape(**dict.fromkeys(StepShape._fields, 0) | {"rows": tokens // 128, "tokens": tokens})
        assert step.seconds(shape) == pytest.approx(ms / 1e3)


def test_ours_finds_more_of_the_prompts_computed_than_counting_requests_does() -> None:
    given = load("skewed", 2, 60, 1)
    ours, counting = (
        play(given, name, 2, published_profile(), 1) for name in (RoutingName.PREDICTED_TTFT, RoutingName.LEAST_LOADED)
    )
    assert all(each.ok for each in ours.outcomes + counting.outcomes)
    assert ours.bound_violations == counting.bound_violations == 0
    assert cached_share(ours) > cached_share(counting)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_as_many_requests_as_are_asked_for(name: str) -> None:
    assert load(name, 4, 20, 1).num_requests == 20
