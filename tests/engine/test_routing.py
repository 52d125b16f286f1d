"""Which replica a rule chooses, by numbers alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from llm_serving.core.choices import RoutingName
from llm_serving.engine.routing import ROUTINGS, Candidate, Routing
from llm_serving.engine.routing.predicted_ttft import MAX_COMPARED
from llm_serving.engine.routing.prefix_affinity import MOST_UNEVEN


def candidate(
    replica: int, num_unfinished: int = 0, num_cached: int = 0, owed: int = 0, used: int = 0, token_s: float = 0.0
) -> Candidate:
    return Candidate(replica, num_unfinished, 100, num_cached, owed, used, block_size=10, token_s=token_s)


def chosen(rule: Routing, *candidates: Candidate, predicted: Mapping[int, float | None] | None = None) -> int:
    return rule.choose(candidates, lambda each: (predicted or {}).get(each.replica)).replica


def test_every_name_has_a_rule() -> None:
    assert set(ROUTINGS) == set(RoutingName)


@pytest.mark.parametrize("name", RoutingName)
def test_asking_again_without_having_placed_anything_gives_the_same(name: RoutingName) -> None:
    rule = ROUTINGS[name]()
    candidates = [candidate(0, 2, used=30), candidate(1), candidate(2, 1)]
    assert len({chosen(rule, *candidates) for _ in range(3)}) == 1


def test_round_robin_goes_round_those_that_are_there() -> None:
    rule, places = ROUTINGS[RoutingName.ROUND_ROBIN](), []
    for living in ((0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (0, 1, 2)):
        places.append(chosen(rule, *map(candidate, living)))
        rule.chosen(places[-1])
    assert places == [0, 1, 2, 0, 1]


def test_least_loaded_counts_requests_alone() -> None:
    rule = ROUTINGS[RoutingName.LEAST_LOADED]()
    assert chosen(rule, candidate(0, 2, num_cached=90), candidate(1, 1), candidate(2, 1)) == 1


def test_prefix_affinity_holds_while_loads_are_even_and_a_tenth_of_the_prompt_is_there() -> None:
    rule = ROUTINGS[RoutingName.PREFIX_AFFINITY]()
    assert chosen(rule, candidate(0), candidate(1, MOST_UNEVEN, num_cached=10)) == 1
    assert chosen(rule, candidate(0), candidate(1, MOST_UNEVEN, num_cached=9)) == 0
    assert chosen(rule, candidate(0), candidate(1, MOST_UNEVEN + 1, num_cached=90)) == 0


def test_block_cost_weighs_what_is_to_be_computed_against_what_is_held() -> None:
    rule = ROUTINGS[RoutingName.BLOCK_COST]()
    assert chosen(rule, candidate(0), candidate(1, used=9, num_cached=50)) == 1  # 2 * 10 against 2 * 5 + 9
    assert chosen(rule, candidate(0), candidate(1, used=11, num_cached=50)) == 0
    assert chosen(rule, candidate(0, owed=100), candidate(1, used=19)) == 1


def test_the_least_predicted_time_decides_then_load_and_load_alone_where_nothing_is_known() -> None:
    rule = ROUTINGS[RoutingName.PREDICTED_TTFT]()
    three = candidate(0), candidate(1, 5), candidate(2, 4)
    assert chosen(rule, *three, predicted={0: 3.0, 1: 2.0, 2: 2.5}) == 1
    assert chosen(rule, *three, predicted={0: 3.0, 1: 2.0, 2: 2.0}) == 2
    assert chosen(rule, *three, predicted={1: 2.0}) == 1
    assert chosen(rule, *three) == 0


def test_of_many_replicas_the_likely_ones_are_compared() -> None:
    rule, asked = ROUTINGS[RoutingName.PREDICTED_TTFT](), set[int]()
    many = [candidate(each, each % 50, num_cached=10 if each in (77, 78) else 0) for each in range(100)]

    def predict(each: Candidate) -> float:
        asked.add(each.replica)
        return float(each.num_unfinished)

    assert rule.choose(many, predict).replica == 0
    assert len(asked) == MAX_COMPARED
    assert {77, 78, 0, 50, 1, 51} <= asked


def test_a_delay_of_others_counts_less_than_ones_own() -> None:
    """To compute a prompt again takes 0.1 s, which 30 others wait for too; where it is cached, the queue is longer."""
    rule = ROUTINGS[RoutingName.PREDICTED_TTFT]()
    cached, free = candidate(0, 30, num_cached=90, token_s=0.001), candidate(1, 30, token_s=0.001)
    assert chosen(rule, cached, free, predicted={0: 1.0, 1: 0.5}) == 0
    assert chosen(rule, cached, free, predicted={0: 2.0, 1: 0.5}) == 1


def test_where_nobody_has_anything_of_a_prompt_a_delay_of_others_counts_little() -> None:
    """To compute it takes 0.1 s anywhere, which 30 others wait for too, or one."""
    rule = ROUTINGS[RoutingName.PREDICTED_TTFT]()
    many, few = candidate(0, 30, num_cached=9, token_s=0.001), candidate(1, 1, num_cached=9, token_s=0.001)
    assert chosen(rule, many, few, predicted={0: 1.0, 1: 1.4}) == 0
    assert chosen(rule, many, few, predicted={0: 1.0, 1: 1.2}) == 1
    assert chosen(rule, many._replace(num_cached_tokens=10), few, predicted={0: 1.0, 1: 1.4}) == 1
