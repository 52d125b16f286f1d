"""Which replica a routing policy chooses, from figures only."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from llm_serving.core.enums import RoutingName
from llm_serving.engine.fleet.routing_policies import (
    MAX_COMPARED,
    MAX_IMBALANCE,
    MIN_MATCH,
    OTHERS_WEIGHT,
    OTHERS_WEIGHT_UNMATCHED,
    ROUTING_POLICIES,
    Candidate,
    Candidates,
    RoutingPolicy,
    load_key,
)


def candidate(
    replica: int, num_unfinished: int = 0, num_cached: int = 0, queued: int = 0, used: int = 0, token_s: float = 0.0
) -> Candidate:
    return Candidate(replica, num_unfinished, 100, num_cached, queued, used, block_size=10, token_s=token_s)


def among(candidates: Sequence[Candidate], away: Sequence[int] = (), latest: int = -1) -> Candidates:
    """Return these candidates, without those in `away`."""
    by_load = sorted(map(load_key, candidates))
    by_index = {each.replica: each for each in candidates}
    cached = {index: by_index[index].num_cached_tokens for _, index in by_load if by_index[index].num_cached_tokens}
    return Candidates(sorted(by_index), by_load, cached, by_index.__getitem__, lambda index: index not in away, latest)


def chosen(policy: RoutingPolicy, *candidates: Candidate, predicted: Mapping[int, float | None] | None = None) -> int:
    return policy(among(candidates), lambda each: (predicted or {}).get(each.replica)).replica


def test_every_routing_name_has_a_policy() -> None:
    assert set(ROUTING_POLICIES) == set(RoutingName)


@pytest.mark.parametrize("name", RoutingName)
def test_routing_policy_is_deterministic(name: RoutingName) -> None:
    policy = ROUTING_POLICIES[name]
    candidates = [candidate(0, 2, used=30), candidate(1), candidate(2, 1)]
    assert len({chosen(policy, *candidates) for _ in range(3)}) == 1


def test_round_robin_alternates_between_the_available_replicas() -> None:
    policy, routed = ROUTING_POLICIES[RoutingName.ROUND_ROBIN], [-1]
    for living in ((0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (0, 1, 2)):
        routed.append(policy(among([*map(candidate, living)], latest=routed[-1]), lambda each: None).replica)
    assert routed == [-1, 0, 1, 2, 0, 1]


def test_least_loaded_counts_only_requests() -> None:
    policy = ROUTING_POLICIES[RoutingName.LEAST_LOADED]
    assert chosen(policy, candidate(0, 2, num_cached=90), candidate(1, 1), candidate(2, 1)) == 1


def test_prefix_affinity_needs_balanced_loads_and_a_tenth_of_the_prompt() -> None:
    policy = ROUTING_POLICIES[RoutingName.PREFIX_AFFINITY]
    assert chosen(policy, candidate(0), candidate(1, MAX_IMBALANCE, num_cached=10)) == 1
    assert chosen(policy, candidate(0), candidate(1, MAX_IMBALANCE, num_cached=9)) == 0
    assert chosen(policy, candidate(0), candidate(1, MAX_IMBALANCE + 1, num_cached=90)) == 0


def test_block_cost_weighs_blocks_to_compute_against_held_blocks() -> None:
    policy = ROUTING_POLICIES[RoutingName.BLOCK_COST]
    assert chosen(policy, candidate(0), candidate(1, used=9, num_cached=50)) == 1  # 2 * 10 against 2 * 5 + 9
    assert chosen(policy, candidate(0), candidate(1, used=11, num_cached=50)) == 0
    assert chosen(policy, candidate(0, queued=100), candidate(1, used=19)) == 1


def test_predicted_ttft_chooses_the_least_ttft_then_the_least_load() -> None:
    policy = ROUTING_POLICIES[RoutingName.PREDICTED_TTFT]
    three = candidate(0), candidate(1, 5), candidate(2, 4)
    assert chosen(policy, *three, predicted={0: 3.0, 1: 2.0, 2: 2.5}) == 1
    assert chosen(policy, *three, predicted={0: 3.0, 1: 2.0, 2: 2.0}) == 2
    assert chosen(policy, *three, predicted={1: 2.0}) == 1
    assert chosen(policy, *three) == 0


def test_predicted_ttft_compares_a_bounded_number_of_replicas() -> None:
    policy, asked = ROUTING_POLICIES[RoutingName.PREDICTED_TTFT], set[int]()
    many = [candidate(each, each % 50, num_cached=10 if each in (77, 78) else 0) for each in range(100)]

    def predict(each: Candidate) -> float:
        asked.add(each.replica)
        return float(each.num_unfinished)

    assert policy(among(many), predict).replica == 0
    assert len(asked) == MAX_COMPARED
    assert {77, 78, 0, 50, 1, 51} <= asked


def test_predicted_ttft_weighs_the_delay_of_other_requests_below_its_own() -> None:
    """Recomputing the prompt takes 0.1 s and delays 30 requests; the replica that caches it has a longer queue."""
    policy = ROUTING_POLICIES[RoutingName.PREDICTED_TTFT]
    cached, free = candidate(0, 30, num_cached=90, token_s=0.001), candidate(1, 30, token_s=0.001)
    assert chosen(policy, cached, free, predicted={0: 1.0, 1: 0.5}) == 0
    assert chosen(policy, cached, free, predicted={0: 2.0, 1: 0.5}) == 1


def test_predicted_ttft_weighs_the_delay_of_others_little_without_a_cached_prefix() -> None:
    """Computing the prompt takes 0.1 s on any replica and delays 30 requests or one."""
    policy = ROUTING_POLICIES[RoutingName.PREDICTED_TTFT]
    many, few = candidate(0, 30, num_cached=9, token_s=0.001), candidate(1, 1, num_cached=9, token_s=0.001)
    assert chosen(policy, many, few, predicted={0: 1.0, 1: 1.4}) == 0
    assert chosen(policy, many, few, predicted={0: 1.0, 1: 1.2}) == 1
    assert chosen(policy, many._replace(num_cached_tokens=10), few, predicted={0: 1.0, 1: 1.4}) == 1


def by_all_numbers(
    name: RoutingName, candidates: Sequence[Candidate], predict: Callable[[Candidate], float | None], last: int
) -> int:
    """Return what a policy should choose, from the figures of every replica."""
    least = min(candidates, key=load_key)
    ranked = sorted(candidates, key=lambda each: (-each.num_cached_tokens, *load_key(each)))
    if name is RoutingName.LEAST_LOADED:
        return least.replica
    if name is RoutingName.ROUND_ROBIN:
        return min(each.replica + 1000 * (each.replica <= last) for each in candidates) % 1000
    if name is RoutingName.BLOCK_COST:
        new = [each.num_queued_tokens + 100 - each.num_cached_tokens for each in candidates]
        costs = [2 * tokens / 10 + each.num_used_blocks for tokens, each in zip(new, candidates, strict=True)]
        return min((cost, *load_key(each)) for cost, each in zip(costs, candidates, strict=True))[2]
    loads, most = [each.num_unfinished for each in candidates], ranked[0].num_cached_tokens
    has_match = most >= 100 * MIN_MATCH
    unmeasured = ranked[0] if has_match and max(loads) - min(loads) <= MAX_IMBALANCE else least
    if name is RoutingName.PREFIX_AFFINITY:
        return unmeasured.replica
    having = [each for each in ranked if each.num_cached_tokens][: MAX_COMPARED // 2]
    likely = [*having, *(each for each in sorted(candidates, key=load_key) if each not in having)][:MAX_COMPARED]
    weight = OTHERS_WEIGHT if has_match else OTHERS_WEIGHT_UNMATCHED
    costs = [
        (seconds + weight * each.num_unfinished * each.prompt_s, *load_key(each))
        for each in (likely if len(candidates) > MAX_COMPARED else candidates)
        if (seconds := predict(each)) is not None
    ]
    return min(costs)[2] if costs else unmeasured.replica


@pytest.mark.parametrize("name", RoutingName)
def test_lazy_candidates_give_the_choice_of_evaluated_ones(name: RoutingName) -> None:
    rng = random.Random(name)
    for _ in range(300):
        few = rng.choice((2, 12, 40))
        cached = rng.choice(([0], [0, 0, 0, 10, 30, 30, 90], [50]))
        every = [
            candidate(
                index, rng.randrange(4), rng.choice(cached), rng.randrange(3), rng.randrange(3), rng.choice((0, 0.01))
            )
            for index in range(few)
        ]
        away = rng.sample(range(few), rng.randrange(few))
        known = {each.replica: rng.choice((None, 0.5, 0.6)) for each in every} if rng.random() < 0.8 else {}
        policy, last = ROUTING_POLICIES[name], rng.randrange(few)

        def predict(each: Candidate, known: dict[int, float | None] = known) -> float | None:
            return known.get(each.replica)

        present = [each for each in every if each.replica not in away]
        expected = by_all_numbers(name, present, predict, last)
        assert policy(among(every, away, last), predict).replica == expected
