"""The share of each class: places and tokens by weight, paid in service, over any window."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler import Scheduler, SchedulerLimits
from llm_serving.scheduler.fair_sharing import FULL_STEP, SCALE, WeightedFairSharing
from support.factories import create_classes, create_request, create_scheduler, run_step

NAMES = ("high", "normal", "low")
NUM_BLOCKS = 140


def create_turns(num_places: int = 14, quantum_steps: int = 8) -> WeightedFairSharing:
    """Weights 4, 2 and 1."""
    limits = SchedulerLimits(
        max_num_batched_tokens=64,
        max_num_seqs=num_places,
        max_prefill_seqs=8,
        max_model_len=64,
        quantum_steps=quantum_steps,
    )
    return WeightedFairSharing(create_classes(), limits, NUM_BLOCKS)


def held(**places: int) -> dict[str, int]:
    return {name: places.get(name, 0) for name in NAMES}


def test_the_highest_that_is_present_contends_and_those_that_have_aged() -> None:
    turns = create_turns()
    turns.update_contenders(["normal", "low"], [], held())
    assert turns.contenders == ["normal"]
    turns.update_contenders(["normal", "low"], ["low"], held())
    assert turns.contenders == ["normal", "low"]
    turns.update_contenders(["low"], [], held(high=1))
    assert turns.contenders == ["high", "low"], "whoever alone waits contends with those that run"


def test_a_class_that_has_aged_contends_as_long_as_it_holds_a_place_below_another() -> None:
    turns = create_turns()
    turns.update_contenders(["high", "low"], ["low"], held())
    turns.update_contenders(["high"], [], held(low=1))
    assert turns.contenders == ["high", "low"]
    turns.update_contenders([], [], held(low=1))
    turns.update_contenders(["high"], [], held(low=1))
    assert turns.contenders == ["high"], "nobody was above it meanwhile"
    turns.update_contenders(["high", "low"], ["low"], held(low=1))
    turns.update_contenders(["high"], [], held())
    assert turns.contenders == ["high"]


def test_places_are_by_weight_and_the_highest_goes_first_where_all_have_theirs() -> None:
    turns = create_turns(num_places=7)
    turns.update_contenders(NAMES, ["normal", "low"], held())
    places = held()
    order = []
    for _ in range(9):
        name = turns.next_class(NAMES, places, held())
        assert name is not None
        places[name] += 1
        order.append(name)
    assert {name: order[:7].count(name) for name in NAMES} == {"high": 4, "normal": 2, "low": 1}
    assert order[7:] == ["high", "high"]


def test_whoever_has_paid_least_is_next() -> None:
    turns = create_turns()
    turns.update_contenders(NAMES, ["normal", "low"], held())
    turns.charge(held(high=4), {"high": 4}, held(), NAMES, NAMES)
    assert turns.next_class(NAMES, held(high=4), held()) == "normal"
    turns.charge(held(high=4, normal=3), {}, held(), NAMES, NAMES)
    assert turns.next_class(NAMES, held(high=4, normal=3), held()) == "low"


def test_a_class_pays_for_what_it_has_more_of_places_or_tokens() -> None:
    turns = create_turns()
    turns.update_contenders(NAMES, ["normal", "low"], held())
    turns.charge(held(high=1), {"high": 64}, held(), NAMES, NAMES)
    assert turns._virtual_time("high") == FULL_STEP * SCALE // 4
    turns.charge(held(high=7), {"high": 1}, held(), NAMES, NAMES)
    assert turns._virtual_time("high") == (FULL_STEP + FULL_STEP // 64) * SCALE // 4


def test_a_class_pays_for_its_blocks_where_they_are_the_largest_share() -> None:
    turns = create_turns()
    turns.update_contenders(NAMES, ["normal", "low"], held())
    turns.charge(held(high=1, low=7), {}, held(high=NUM_BLOCKS, low=1), NAMES, NAMES)
    assert turns._virtual_time("high") == FULL_STEP * SCALE // 4
    assert turns._virtual_time("low") == FULL_STEP // 2 * SCALE


def test_who_holds_its_share_of_the_blocks_is_not_next_though_it_has_places_left() -> None:
    turns = create_turns()
    turns.update_contenders(NAMES, ["normal", "low"], held())
    share = NUM_BLOCKS * 4 // 7
    assert turns.next_class(NAMES, held(high=1), held(high=share - 1)) == "high"
    assert turns.next_class(NAMES, held(high=1), held(high=share)) == "normal"


def test_those_are_covered_that_fit_into_the_share_of_places_and_of_blocks() -> None:
    """Weights of 4 and 1: of 14 places and 140 blocks the lower class has 2.8 and 28."""
    turns = create_turns(quantum_steps=1)
    turns.update_contenders(["high", "low"], ["low"], held())
    assert turns.num_entitled("low", "high", [1, 1, 1, 1]) == 3, "a part of a place is the whole for a turn"
    assert turns.num_entitled("low", "high", [14, 14, 14]) == 2
    assert turns.num_entitled("low", "high", [20, 20, 20]) == 2, "a part of its blocks, too"
    for _ in range(3):
        turns.charge(held(low=1), {}, held(low=40), ["low"], ())
        turns._usage["high"] = (0, 0, 0)
    turns._usage["low"] = (0, 0, 3 * FULL_STEP * SCALE)
    assert turns.num_entitled("low", "high", [1, 1, 1, 1]) == 2
    assert turns.num_entitled("low", "high", [14, 14, 14]) == 2
    assert turns.num_entitled("low", "high", [20, 20, 20]) == 1


def test_whose_prompts_come_first_is_decided_by_tokens_alone() -> None:
    """Whoever holds a place or blocks and gets no tokens pays for them, and would never be first."""
    turns = create_turns()
    turns.update_contenders(NAMES, ["normal", "low"], held())
    for _ in range(100):
        turns.charge(held(low=7), {"high": 64}, held(low=NUM_BLOCKS), NAMES, ["high", "low"])
    assert turns._virtual_time("low") > turns._virtual_time("high")
    assert turns.next_prefill_class({"high", "low"}) == "low"


def test_who_wanted_no_more_tokens_is_not_behind_in_them_later() -> None:
    turns = create_turns()
    turns.update_contenders(["high", "low"], ["low"], held())
    for _ in range(100):
        turns.charge(held(low=1), {"high": 1, "low": 63}, held(), ["low"], ["low"])
    assert turns._prefill_usage == held()


def test_who_has_paid_a_turn_less_than_another_may_have_more_than_its_places() -> None:
    turns = create_turns(num_places=7, quantum_steps=8)
    turns.update_contenders(["high", "normal"], ["normal"], held())
    places = held(high=5)
    for _ in range(2):
        assert turns.next_class(["high", "normal"], places, held()) == "normal"
        turns.charge(places, {"normal": 64}, held(), ["high", "normal"], ["normal"])
    assert turns.next_class(["high", "normal"], places, held()) == "high"


def test_prompts_leave_out_what_decodes_no_longer_than_the_weight_of_a_class_that_contends_lets_them() -> None:
    turns = create_turns()
    assert turns.max_decode_gap("high") is None, "nobody contends"
    turns.update_contenders(NAMES, [], held())
    assert turns.max_decode_gap("high") is None, "nobody contends with it"
    turns.update_contenders(NAMES, ["low"], held())
    assert [turns.max_decode_gap(name) for name in NAMES] == [1, None, 4]  # of 4 + 1
    turns.update_contenders(NAMES, ["normal", "low"], held())
    assert [turns.max_decode_gap(name) for name in NAMES] == [1, 2, 6]


def test_who_has_all_it_wants_saves_up_no_turns() -> None:
    turns = create_turns(num_places=1)
    for _ in range(100):
        turns.update_contenders(["low"], ["low"], held(high=0, low=1))
        turns.charge(held(low=1), {}, held(), NAMES, NAMES)
    turns.update_contenders(["high", "low"], ["low"], held(low=1))
    assert turns._virtual_time("high") == turns._virtual_time("low") == 0


def test_where_nobody_wants_more_nobody_saves_up_turns() -> None:
    turns = create_turns()
    turns.update_contenders(["high", "low"], ["low"], held(high=7, low=1))
    for _ in range(100):
        turns.charge(held(high=7, low=1), {"high": 7, "low": 1}, held(), [], [])
    assert turns._virtual_time("high") == turns._virtual_time("low") == 0


def test_who_has_a_prompt_to_compute_does_not_have_all_it_wants() -> None:
    turns = create_turns()
    turns.update_contenders(["high"], ["low"], held(low=1))
    assert turns.next_prefill_class({"high", "low"}) == "high"
    turns.charge(held(low=1), {"high": 64}, held(), NAMES, NAMES)
    assert turns.next_prefill_class({"high", "low"}) == "low"
    assert turns.next_prefill_class({"high"}) is None


def test_what_was_not_needed_of_the_one_is_not_had_for_nothing_much_later() -> None:
    turns = create_turns(num_places=2, quantum_steps=8)
    turns.update_contenders(["high", "low"], ["low"], held(high=1, low=1))
    for _ in range(1000):
        turns.charge(held(high=1, low=1), {"high": 64}, held(), NAMES, NAMES)
    assert min(turns._usage["high"]) == turns._virtual_time("high") - 8 * FULL_STEP * SCALE // 4


def test_of_a_fraction_of_a_place_a_class_has_the_whole_for_a_turn() -> None:
    turns = create_turns(num_places=1, quantum_steps=8)
    covered = []
    for _ in range(20):
        turns.update_contenders(["high", "low"], ["low"], held(low=1))
        covered.append(turns.num_entitled("low", "high", [1]))
        turns.charge(held(low=1), {}, held(), NAMES, NAMES)
    assert covered == [1] * 9 + [0] * 11


# --- in a scheduler -------------------------------------------------------------------------------------------------


class Crowd:
    """Keeps so many requests of each kind waiting, and counts places and tokens of each class."""

    def __init__(self, scheduler: Scheduler, *kinds: dict[str, Any]) -> None:
        self.scheduler = scheduler
        self.kinds = kinds
        self.places = dict.fromkeys(NAMES, 0)
        self.tokens = dict.fromkeys(NAMES, 0)
        self.blocks = dict.fromkeys(NAMES, 0)
        self._requests: list[list[Request]] = [[] for _ in kinds]

    def run(self, num_steps: int) -> None:
        self.places, self.tokens, self.blocks = (dict.fromkeys(NAMES, 0) for _ in range(3))
        for _ in range(num_steps):
            for kind, requests in zip(self.kinds, self._requests, strict=True):
                requests[:] = [each for each in requests if each.status is RequestStatus.WAITING]
                while len(requests) < 20:
                    request = create_request(
                        kind["prompt"], max_tokens=kind["output"], priority=NAMES.index(kind["name"]) - 1
                    )
                    self.scheduler.add(request)
                    requests.append(request)
            schedule = run_step(self.scheduler)
            assert schedule is not None and schedule.num_bound_violations == 0
            for row in schedule.rows:
                self.tokens[row.request.request_class.name] += row.query_len
            for name, number in self.scheduler.slots_by_class.items():
                self.places[name] += number
            for request in self.scheduler.running:
                name = request.request_class.name
                self.blocks[name] += self.scheduler.blocks.num_blocks_held(request.request_id)


def test_long_requests_of_a_lower_class_that_has_aged_leave_the_higher_one_its_places() -> None:
    """Weights were paid in admissions: a few long requests then held all places, until they ended by themselves."""
    scheduler = create_scheduler(
        max_num_seqs=6, num_blocks=1000, max_model_len=800, classes=create_classes(ageing_steps=20)
    )
    crowd = Crowd(scheduler, {"name": "high", "prompt": 4, "output": 8}, {"name": "normal", "prompt": 4, "output": 700})
    crowd.run(100)
    for _ in range(10):
        crowd.run(100)
        assert crowd.places["high"] >= 100 * 6 * 4 // 6 - 100
        assert crowd.places["normal"] >= 100 * 6 * 2 // 6 - 100


def test_long_requests_that_hold_few_places_leave_the_higher_class_its_blocks() -> None:
    """Of the cache they held nearly all: places and tokens were what classes paid for."""
    scheduler = create_scheduler(
        max_num_seqs=8,
        num_blocks=100,
        max_model_len=240,
        max_preemptions=1000,
        quantum_steps=8,
        classes=create_classes(ageing_steps=20),
    )
    crowd = Crowd(scheduler, {"name": "high", "prompt": 32, "output": 8}, {"name": "low", "prompt": 120, "output": 100})
    crowd.run(200)
    crowd.run(1000)
    shares = {name: number / (100 * 1000) for name, number in crowd.blocks.items()}
    assert shares["low"] < 0.3, shares
    assert shares["high"] > 0.4, shares


@pytest.mark.parametrize("num_places", [1, 2])
def test_one_place_is_shared_in_turns(num_places: int) -> None:
    scheduler = create_scheduler(
        max_num_seqs=num_places,
        num_blocks=400,
        max_preemptions=1000,
        quantum_steps=8,
        classes=create_classes(ageing_steps=20),
    )
    crowd = Crowd(scheduler, {"name": "high", "prompt": 4, "output": 8}, {"name": "low", "prompt": 4, "output": 200})
    crowd.run(100)
    crowd.run(2000)
    total = sum(crowd.places.values())
    assert crowd.places["high"] / total == pytest.approx(4 / 5, abs=0.03)


def test_prompts_that_fill_every_step_leave_a_lower_class_its_share() -> None:
    """A prompt that had been admitted was left out for as long as prompts of a higher class filled the steps."""
    scheduler = create_scheduler(
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=64,
        num_blocks=400,
        classes=create_classes(ageing_steps=20),
    )
    crowd = Crowd(scheduler, {"name": "high", "prompt": 24, "output": 1}, {"name": "low", "prompt": 40, "output": 1})
    crowd.run(100)
    crowd.run(1000)
    of_tokens = crowd.tokens["low"] / sum(crowd.tokens.values())
    of_places = crowd.places["low"] / (8 * 1000)
    assert of_tokens > 0.1
    assert max(of_tokens, of_places) == pytest.approx(1 / 5, abs=0.04)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_prompt_whose_class_has_nobody_else_is_not_left_out_for_ever(is_first: bool) -> None:
    """It has its place, and prompts of a higher class fill every step: it gets its share, whenever it was admitted."""
    scheduler = create_scheduler(
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=128,
        num_blocks=400,
        classes=create_classes(ageing_steps=20),
    )
    alone = create_request(100, max_tokens=1, priority=1)
    crowd = Crowd(scheduler, {"name": "high", "prompt": 24, "output": 1})
    if not is_first:
        crowd.run(1)
    scheduler.add(alone)
    if is_first:
        run_step(scheduler)
        assert alone.status is RequestStatus.RUNNING
    # 7 steps of a prompt, of which a fifth is its class's.
    crowd.run(20 + 5 * 7 + 5)
    assert alone.is_finished


def test_a_prompt_that_holds_blocks_is_computed_though_higher_classes_fill_every_step() -> None:
    """It paid for its blocks while it got no tokens, so that its class was never first, and nobody watched."""
    scheduler = create_scheduler(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=16,
        num_blocks=20,
        classes=create_classes(ageing_steps=20),
    )
    kinds = [{"name": name, "prompt": 8, "output": 1} for name in ("high", "normal")]
    crowd = Crowd(scheduler, *kinds, {"name": "low", "prompt": 15, "output": 1})
    crowd.run(400)
    assert crowd.tokens["low"] > 400 * 32 / 7 / 2


def test_a_class_that_has_aged_decodes_in_its_part_of_the_steps_that_prompts_of_higher_ones_would_fill() -> None:
    scheduler = create_scheduler(
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=64,
        num_blocks=400,
        max_decode_gap=1000,
        classes=create_classes(ageing_steps=20),
    )
    kinds = [{"name": name, "prompt": 24, "output": 1} for name in ("high", "normal")]
    crowd = Crowd(scheduler, *kinds, {"name": "low", "prompt": 1, "output": 60})
    crowd.run(100)
    decoding = [request for request in scheduler.running if request.request_class.name == "low"]
    before = [request.num_computed_tokens for request in decoding]
    crowd.run(70)
    assert [request.num_computed_tokens - num for request, num in zip(decoding, before, strict=True)] >= [10]


def test_a_class_does_not_pay_for_what_it_had_while_nobody_waited() -> None:
    """It did: after hours in which a request of an aged class was always there, the higher class waited for as long."""
    scheduler = create_scheduler(
        max_num_seqs=8, num_blocks=100, classes=create_classes(ageing_steps=20), quantum_steps=8
    )
    crowd = Crowd(scheduler, *({"name": name, "prompt": 4, "output": 8} for name in ("high", "low")))
    crowd.run(100)
    for request in [*scheduler.waiting]:
        scheduler.finish(request, FinishReason.ABORT)
    for step in range(3000):
        if step % 7 == 0:  # each takes 8 steps: one is there when another ends
            scheduler.add(create_request(1, max_tokens=8, priority=1))
        if step % 4:
            scheduler.add(create_request(1, max_tokens=8, priority=-1))
        run_step(scheduler)
    assert scheduler.waiting.sharing.contenders == ["high", "low"]
    crowd.run(100)
    assert crowd.places["high"] >= 100 * 8 * 4 // 5 - 100


@pytest.mark.parametrize("weights", [(4, 1), (1_000_000, 600_001), (600_001, 1_000_000), (1_000_000, 1)])
def test_weights_are_told_apart_up_to_the_largest(weights: tuple[int, int]) -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=1, max_prefill_seqs=8, max_model_len=64)
    classes = create_classes(high={"weight": weights[0]}, low={"weight": weights[1]})
    turns, waiting, places = WeightedFairSharing(classes, limits, NUM_BLOCKS), ("high", "low"), held()
    count = 0
    for _ in range(2000):
        turns.update_contenders(waiting, ["low"], places)
        name = turns.next_class(waiting, held(), held())
        assert name is not None
        places = held(**{name: 1})
        turns.update_contenders(waiting, ["low"], places)
        turns.charge(places, {name: 64}, places, waiting, ())
        count += name == "high"
    assert count / 2000 == pytest.approx(weights[0] / sum(weights), abs=0.02)
