"""The worst that liars did to a request so far, played again: no bound is broken, and none is far from what was met.

`tests/adversary.py` searches for worse.
"""

from __future__ import annotations

from typing import Any

import pytest
from adversary import CLASSES, SETTINGS, SPREAD, Attack, Liar, Strategy, create_attacked, search
from factories import create_request, run_step
from llm_serving.core.request import RequestStatus
from llm_serving.core.request_class import MAX_PRIORITY


@pytest.mark.parametrize(
    ("setting", "victim"),
    [("one class, 1 place", 0), ("one class, 4 places", 0), ("three classes, 4 places", 0)],
)
def test_a_bound_is_at_most_five_times_what_liars_reach(setting: str, victim: int) -> None:
    options: dict[str, Any] = SETTINGS[setting]
    worst = search(options, options["classes"][victim], num_rounds=0, seed=1)
    assert 1.0 <= worst.ratio <= 5.0


def test_prompts_that_leave_out_what_decodes_are_reckoned_with() -> None:
    """Long answers of the lowest class, of which each token waits for prompts of the others."""
    batch = CLASSES[2]
    others = [Liar(each.rank, False, 15, 1, False, 6) for each in CLASSES[:2]]
    strategy = Strategy((Liar(batch.rank, True, 1, 15, True, 3), *others), 40, 1)
    waited, bound = Attack(create_attacked(classes=CLASSES, max_num_seqs=4), strategy, batch).run()
    assert 100 < waited <= bound


def test_no_priority_keeps_another_of_its_class_waiting_for_ever() -> None:
    """64 clients that come again at once, each with the best priority there is, and one with the worst of its class."""
    scheduler = create_attacked(classes=CLASSES, max_num_seqs=16, max_head_start_steps=64)
    victim = create_request(4, max_tokens=4, priority=CLASSES[0].rank + SPREAD)
    liars = [create_request(4, max_tokens=8, priority=-MAX_PRIORITY, tenant=str(number)) for number in range(64)]
    for liar in liars[:48]:
        scheduler.add(liar)
    scheduler.add(victim)
    num_steps = 0
    while victim.status is RequestStatus.WAITING:
        for number, liar in enumerate(liars):
            if liar.is_finished or (number >= 48 and num_steps == 0):
                liars[number] = create_request(4, max_tokens=8, priority=-MAX_PRIORITY, tenant=str(number))
                scheduler.add(liars[number])
        schedule = run_step(scheduler)
        assert schedule is not None and schedule.num_bound_violations == 0
        num_steps += 1
        assert num_steps < 500
    assert victim.num_steps_waited is not None and victim.wait_bound is not None
    assert victim.num_steps_waited <= victim.wait_bound
