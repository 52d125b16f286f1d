"""Weighted fair sharing of classes: slots and tokens by weight, charged by service, over any period."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.scheduler import Scheduler, SchedulerLimits
from llm_serving.scheduler.fair_sharing import FULL_STEP, SCALE, WeightedFairSharing
from support.factories import create_classes, create_request, create_scheduler, run_step

NAMES = ("high", "normal", "low")
NUM_BLOCKS = 140


def create_sharing(num_slots: int = 14, quantum_steps: int = 8) -> WeightedFairSharing:
    """Create the sharing of slots between classes with the weights 4, 2 and 1."""
    limits = SchedulerLimits(
        max_num_batched_tokens=64,
        max_num_seqs=num_slots,
        max_prefill_seqs=8,
        max_model_len=64,
        quantum_steps=quantum_steps,
    )
    return WeightedFairSharing(create_classes(), limits, NUM_BLOCKS)


def held(**slots: int) -> dict[str, int]:
    return {name: slots.get(name, 0) for name in NAMES}


def test_highest_present_class_and_aged_classes_contend() -> None:
    sharing = create_sharing()
    sharing.update_contenders(["normal", "low"], [], held())
    assert sharing.contenders == ["normal"]
    sharing.update_contenders(["normal", "low"], ["low"], held())
    assert sharing.contenders == ["normal", "low"]
    sharing.update_contenders(["low"], [], held(high=1))
    assert sharing.contenders == ["high", "low"], "the only waiting class contends with running ones"


def test_aged_class_contends_while_it_holds_a_slot_below_another_class() -> None:
    sharing = create_sharing()
    sharing.update_contenders(["high", "low"], ["low"], held())
    sharing.update_contenders(["high"], [], held(low=1))
    assert sharing.contenders == ["high", "low"]
    sharing.update_contenders([], [], held(low=1))
    sharing.update_contenders(["high"], [], held(low=1))
    assert sharing.contenders == ["high"], "no higher class was present meanwhile"
    sharing.update_contenders(["high", "low"], ["low"], held(low=1))
    sharing.update_contenders(["high"], [], held())
    assert sharing.contenders == ["high"]


def test_slots_follow_weights_and_the_highest_class_gets_the_rest() -> None:
    sharing = create_sharing(num_slots=7)
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    slots = held()
    order = []
    for _ in range(9):
        name = sharing.next_class(NAMES, slots, held())
        assert name is not None
        slots[name] += 1
        order.append(name)
    assert {name: order[:7].count(name) for name in NAMES} == {"high": 4, "normal": 2, "low": 1}
    assert order[7:] == ["high", "high"]


def test_class_with_the_least_usage_is_next() -> None:
    sharing = create_sharing()
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    sharing.charge(held(high=4), {"high": 4}, held(), NAMES, NAMES)
    assert sharing.next_class(NAMES, held(high=4), held()) == "normal"
    sharing.charge(held(high=4, normal=3), {}, held(), NAMES, NAMES)
    assert sharing.next_class(NAMES, held(high=4, normal=3), held()) == "low"


def test_class_is_charged_for_the_larger_share_of_slots_and_tokens() -> None:
    sharing = create_sharing()
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    sharing.charge(held(high=1), {"high": 64}, held(), NAMES, NAMES)
    assert sharing._virtual_time("high") == FULL_STEP * SCALE // 4
    sharing.charge(held(high=7), {"high": 1}, held(), NAMES, NAMES)
    assert sharing._virtual_time("high") == (FULL_STEP + FULL_STEP // 64) * SCALE // 4


def test_class_is_charged_for_blocks_if_they_are_its_largest_share() -> None:
    sharing = create_sharing()
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    sharing.charge(held(high=1, low=7), {}, held(high=NUM_BLOCKS, low=1), NAMES, NAMES)
    assert sharing._virtual_time("high") == FULL_STEP * SCALE // 4
    assert sharing._virtual_time("low") == FULL_STEP // 2 * SCALE


def test_class_at_its_share_of_blocks_is_not_next() -> None:
    sharing = create_sharing()
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    share = NUM_BLOCKS * 4 // 7
    assert sharing.next_class(NAMES, held(high=1), held(high=share - 1)) == "high"
    assert sharing.next_class(NAMES, held(high=1), held(high=share)) == "normal"


def test_class_is_entitled_to_requests_within_its_share_of_slots_and_blocks() -> None:
    """Weights of 4 and 1: of 14 slots and 140 blocks the lower class has 2.8 and 28."""
    sharing = create_sharing(quantum_steps=1)
    sharing.update_contenders(["high", "low"], ["low"], held())
    assert sharing.num_entitled("low", "high", [1, 1, 1, 1]) == 3, "a part of a slot is a whole slot for a quantum"
    assert sharing.num_entitled("low", "high", [14, 14, 14]) == 2
    assert sharing.num_entitled("low", "high", [20, 20, 20]) == 2, "a part of its blocks, too"
    for _ in range(3):
        sharing.charge(held(low=1), {}, held(low=40), ["low"], ())
        sharing._usage["high"] = (0, 0, 0)
    sharing._usage["low"] = (0, 0, 3 * FULL_STEP * SCALE)
    assert sharing.num_entitled("low", "high", [1, 1, 1, 1]) == 2
    assert sharing.num_entitled("low", "high", [14, 14, 14]) == 2
    assert sharing.num_entitled("low", "high", [20, 20, 20]) == 1


def test_order_of_prefills_depends_on_tokens_alone() -> None:
    """A class that holds slots or blocks without tokens is charged for them, and would never come first."""
    sharing = create_sharing()
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    for _ in range(100):
        sharing.charge(held(low=7), {"high": 64}, held(low=NUM_BLOCKS), NAMES, ["high", "low"])
    assert sharing._virtual_time("low") > sharing._virtual_time("high")
    assert sharing.next_prefill_class({"high", "low"}) == "low"


def test_class_without_demand_earns_no_credit_in_tokens() -> None:
    sharing = create_sharing()
    sharing.update_contenders(["high", "low"], ["low"], held())
    for _ in range(100):
        sharing.charge(held(low=1), {"high": 1, "low": 63}, held(), ["low"], ["low"])
    assert sharing._prefill_usage == held()


def test_class_a_quantum_behind_may_exceed_its_share_of_slots() -> None:
    sharing = create_sharing(num_slots=7, quantum_steps=8)
    sharing.update_contenders(["high", "normal"], ["normal"], held())
    slots = held(high=5)
    for _ in range(2):
        assert sharing.next_class(["high", "normal"], slots, held()) == "normal"
        sharing.charge(slots, {"normal": 64}, held(), ["high", "normal"], ["normal"])
    assert sharing.next_class(["high", "normal"], slots, held()) == "high"


def test_max_decode_gap_follows_the_weight_of_a_contending_class() -> None:
    sharing = create_sharing()
    assert sharing.max_decode_gap("high") is None, "no class contends"
    sharing.update_contenders(NAMES, [], held())
    assert sharing.max_decode_gap("high") is None, "no other class contends"
    sharing.update_contenders(NAMES, ["low"], held())
    assert [sharing.max_decode_gap(name) for name in NAMES] == [1, None, 4]  # of 4 + 1
    sharing.update_contenders(NAMES, ["normal", "low"], held())
    assert [sharing.max_decode_gap(name) for name in NAMES] == [1, 2, 6]


def test_class_without_demand_earns_no_credit() -> None:
    sharing = create_sharing(num_slots=1)
    for _ in range(100):
        sharing.update_contenders(["low"], ["low"], held(high=0, low=1))
        sharing.charge(held(low=1), {}, held(), NAMES, NAMES)
    sharing.update_contenders(["high", "low"], ["low"], held(low=1))
    assert sharing._virtual_time("high") == sharing._virtual_time("low") == 0


def test_no_class_earns_credit_without_demand() -> None:
    sharing = create_sharing()
    sharing.update_contenders(["high", "low"], ["low"], held(high=7, low=1))
    for _ in range(100):
        sharing.charge(held(high=7, low=1), {"high": 7, "low": 1}, held(), [], [])
    assert sharing._virtual_time("high") == sharing._virtual_time("low") == 0


def test_class_with_a_prompt_to_compute_has_demand() -> None:
    sharing = create_sharing()
    sharing.update_contenders(["high"], ["low"], held(low=1))
    assert sharing.next_prefill_class({"high", "low"}) == "high"
    sharing.charge(held(low=1), {"high": 64}, held(), NAMES, NAMES)
    assert sharing.next_prefill_class({"high", "low"}) == "low"
    assert sharing.next_prefill_class({"high"}) is None


def test_unused_resource_earns_at_most_a_quantum_of_credit() -> None:
    sharing = create_sharing(num_slots=2, quantum_steps=8)
    sharing.update_contenders(["high", "low"], ["low"], held(high=1, low=1))
    for _ in range(1000):
        sharing.charge(held(high=1, low=1), {"high": 64}, held(), NAMES, NAMES)
    assert min(sharing._usage["high"]) == sharing._virtual_time("high") - 8 * FULL_STEP * SCALE // 4


def test_class_with_a_fraction_of_a_slot_keeps_it_for_a_quantum() -> None:
    sharing = create_sharing(num_slots=1, quantum_steps=8)
    covered = []
    for _ in range(20):
        sharing.update_contenders(["high", "low"], ["low"], held(low=1))
        covered.append(sharing.num_entitled("low", "high", [1]))
        sharing.charge(held(low=1), {}, held(), NAMES, NAMES)
    assert covered == [1] * 9 + [0] * 11


# --- in a scheduler -------------------------------------------------------------------------------------------------


class Crowd:
    """Keeps a number of requests of each kind waiting, and counts slots and tokens of each class."""

    def __init__(self, scheduler: Scheduler, *kinds: dict[str, Any]) -> None:
        self.scheduler = scheduler
        self.kinds = kinds
        self.slots = dict.fromkeys(NAMES, 0)
        self.tokens = dict.fromkeys(NAMES, 0)
        self.blocks = dict.fromkeys(NAMES, 0)
        self._requests: list[list[Request]] = [[] for _ in kinds]

    def run(self, num_steps: int) -> None:
        self.slots, self.tokens, self.blocks = (dict.fromkeys(NAMES, 0) for _ in range(3))
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
                self.slots[name] += number
            for request in self.scheduler.running:
                name = request.request_class.name
                self.blocks[name] += self.scheduler.blocks.num_blocks_held(request.request_id)


def test_long_requests_of_an_aged_class_leave_the_higher_class_its_slots() -> None:
    """Regression: weights were charged by admissions, so a few long requests held all slots until they finished."""
    scheduler = create_scheduler(
        max_num_seqs=6, num_blocks=1000, max_model_len=800, classes=create_classes(ageing_steps=20)
    )
    crowd = Crowd(scheduler, {"name": "high", "prompt": 4, "output": 8}, {"name": "normal", "prompt": 4, "output": 700})
    crowd.run(100)
    for _ in range(10):
        crowd.run(100)
        assert crowd.slots["high"] >= 100 * 6 * 4 // 6 - 100
        assert crowd.slots["normal"] >= 100 * 6 * 2 // 6 - 100


def test_long_requests_with_few_slots_leave_the_higher_class_its_blocks() -> None:
    """Regression: classes were charged for slots and tokens only, and held nearly the whole cache."""
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


@pytest.mark.parametrize("num_slots", [1, 2])
def test_single_slot_is_shared_by_quanta(num_slots: int) -> None:
    scheduler = create_scheduler(
        max_num_seqs=num_slots,
        num_blocks=400,
        max_preemptions=1000,
        quantum_steps=8,
        classes=create_classes(ageing_steps=20),
    )
    crowd = Crowd(scheduler, {"name": "high", "prompt": 4, "output": 8}, {"name": "low", "prompt": 4, "output": 200})
    crowd.run(100)
    crowd.run(2000)
    total = sum(crowd.slots.values())
    assert crowd.slots["high"] / total == pytest.approx(4 / 5, abs=0.03)


def test_prompts_that_fill_every_step_leave_a_lower_class_its_share_of_slots() -> None:
    """Regression: an admitted prompt was left out while prompts of a higher class filled the steps."""
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
    of_slots = crowd.slots["low"] / (8 * 1000)
    assert of_tokens > 0.1
    assert max(of_tokens, of_slots) == pytest.approx(1 / 5, abs=0.04)


@pytest.mark.parametrize("is_first", [True, False])
def test_only_prompt_of_a_class_is_computed_eventually(is_first: bool) -> None:
    """A request with a slot gets its share although prompts of a higher class fill every step."""
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


def test_prompt_with_blocks_is_computed_although_higher_classes_fill_every_step() -> None:
    """Regression: its class was charged for blocks while it got no tokens, so it never came first."""
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


def test_aged_class_decodes_in_its_share_of_steps_full_of_prompts() -> None:
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


def test_class_is_not_charged_for_usage_without_contention() -> None:
    """Regression: after hours with a request of an aged class, the higher class waited for hours."""
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
    assert crowd.slots["high"] >= 100 * 8 * 4 // 5 - 100


@pytest.mark.parametrize("weights", [(4, 1), (1_000_000, 600_001), (600_001, 1_000_000), (1_000_000, 1)])
def test_charges_differ_up_to_the_largest_weights(weights: tuple[int, int]) -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=1, max_prefill_seqs=8, max_model_len=64)
    classes = create_classes(high={"weight": weights[0]}, low={"weight": weights[1]})
    sharing, waiting, slots = WeightedFairSharing(classes, limits, NUM_BLOCKS), ("high", "low"), held()
    count = 0
    for _ in range(2000):
        sharing.update_contenders(waiting, ["low"], slots)
        name = sharing.next_class(waiting, held(), held())
        assert name is not None
        slots = held(**{name: 1})
        sharing.update_contenders(waiting, ["low"], slots)
        sharing.charge(slots, {name: 64}, slots, waiting, ())
        count += name == "high"
    assert count / 2000 == pytest.approx(weights[0] / sum(weights), abs=0.02)
