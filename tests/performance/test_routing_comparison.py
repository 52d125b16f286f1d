"""The comparison of routing rules: caches are found where they are."""

import pytest
from llm_serving.core.enums import RoutingName
from llm_serving.whatif.profile import read_profile
from replica_comparison import PUBLISHED
from routing_comparison import LOADS, cached_share, load, play_routed


def test_ours_finds_more_of_the_prompts_computed_than_counting_requests_does() -> None:
    given, profile = load("skewed", 2, 60, 1), read_profile(PUBLISHED)
    ours, counting = (
        play_routed(given, name, 2, profile, 1) for name in (RoutingName.PREDICTED_TTFT, RoutingName.LEAST_LOADED)
    )
    assert all(each.ok for each in ours.outcomes + counting.outcomes)
    assert ours.bound_violations == counting.bound_violations == 0
    assert cached_share(ours) > cached_share(counting)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_as_many_requests_as_are_asked_for(name: str) -> None:
    assert load(name, 4, 20, 1).num_requests == 20
