"""The worst waits that hostile clients have caused so far: no wait exceeds its bound, and each bound is close to the
wait.

`tests/tools/adversary.py` searches for worse ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.core.request import RequestStatus
from llm_serving.core.request_class import MAX_PRIORITY
from support.factories import create_request, run_step
from tools.adversary import (
    CLASSES,
    NUM_PRIORITIES,
    SETTINGS,
    Attack,
    HostileClient,
    Move,
    Strategy,
    create_attacked,
    moves,
    search,
)

LONG, HALF, FULL_STEP = (1, 15), (8, 8), (15, 1)
WORST = [
    ("one class, 1 slot", "standard", Move(LONG), 1.3),
    ("one class, 4 slots", "standard", Move(LONG), 1.8),
    ("three classes, 1 slot", "interactive", Move(LONG, (LONG, FULL_STEP)), 1.2),
    ("three classes, 4 slots", "interactive", Move(LONG, (LONG, LONG)), 2.0),
    ("three classes, 4 slots", "standard", Move(LONG, (HALF, HALF)), 3.7),
    ("three classes, 8 slots", "interactive", Move(LONG, (LONG, LONG), 6), 2.7),
    ("three classes, 8 slots", "standard", Move(LONG, (FULL_STEP, FULL_STEP)), 3.7),
    ("three classes, 8 slots, small cache", "interactive", Move(LONG, (LONG, LONG), 6), 4.6),
    ("three classes, 8 slots, small cache", "standard", Move(LONG, (LONG, FULL_STEP)), 6.4),
    ("three classes, 4 slots, one of 2 replicas", "interactive", Move(LONG, (LONG, LONG)), 2.8),
    ("three classes, 4 slots, one of 2 replicas", "standard", Move(LONG, (HALF, HALF)), 4.3),
    ("mixed, three classes, 4 slots", "interactive", Move(LONG, (LONG, LONG)), 2.0),
    ("mixed, three classes, 4 slots", "standard", Move(LONG, (HALF, HALF)), 2.8),
    ("mixed, three classes, 4 slots", "batch", Move(LONG, (HALF, HALF)), 3.0),
    ("shortest, three classes, 4 slots", "interactive", Move(LONG, (LONG, LONG)), 2.0),
    ("shortest, three classes, 4 slots", "standard", Move(LONG, (HALF, HALF)), 3.7),
]
"""Setting, class of the victim, a move that the search finds early, and the maximum ratio of the bound to its wait.

Further search rounds find longer waits."""


@pytest.mark.parametrize(("setting", "victim", "move", "most"), WORST)
def test_bound_is_close_to_the_worst_wait_that_an_adversary_reaches(
    setting: str, victim: str, move: Move, most: float
) -> None:
    options: dict[str, Any] = SETTINGS[setting]
    victim_class = next(each for each in options["classes"] if each.name == victim)
    strategy = move.strategy(options["classes"], victim_class)
    waited, bound = Attack(create_attacked(**options), strategy, victim_class).run()
    assert waited <= bound <= most * waited


def test_adversary_search_starts_with_a_move_for_each_term_and_keeps_the_worst() -> None:
    options: dict[str, Any] = SETTINGS["one class, 4 slots"]
    (victim,) = options["classes"]
    first = moves(options["classes"], victim)
    assert first == [Move(own).strategy(options["classes"], victim) for own in (LONG, HALF, FULL_STEP)]
    assert search(options, victim, num_rounds=0, seed=1).strategy == first[0]


def test_bound_includes_steps_whose_prompts_skip_decoding() -> None:
    """Long answers of the lowest class, of which each token waits for prompts of the others."""
    batch = CLASSES[2]
    others = [HostileClient(each.rank, False, 15, 1, False, 6) for each in CLASSES[:2]]
    strategy = Strategy((HostileClient(batch.rank, True, 1, 15, True, 3), *others), 40, 1)
    waited, bound = Attack(create_attacked(classes=CLASSES, max_num_seqs=4), strategy, batch).run()
    assert 100 < waited <= bound


def test_class_keeps_its_weight_with_a_long_max_decode_gap() -> None:
    """Earlier, other classes were charged for prompt tokens, and long answers for slots without tokens."""
    standard = CLASSES[1]
    others = [HostileClient(each.rank, False, 12, 1, False, 20) for each in CLASSES if each is not standard]
    strategy = Strategy((HostileClient(standard.rank, True, 1, 15, True, 6), *others), 150, 1)
    options = SETTINGS["three classes, 8 slots, long decode gap"]
    waited, bound = Attack(create_attacked(**options), strategy, standard).run()
    assert 0 < waited <= bound


def test_priority_never_starves_a_request_of_its_class() -> None:
    """64 clients always send their next request at once, with the best priority; one client has the worst priority."""
    scheduler = create_attacked(classes=CLASSES, max_num_seqs=16, max_head_start_steps=64)
    victim = create_request(4, max_tokens=4, priority=CLASSES[0].rank + NUM_PRIORITIES)
    adversaries = [create_request(4, max_tokens=8, priority=-MAX_PRIORITY, tenant=str(number)) for number in range(64)]
    for adversary in adversaries[:48]:
        scheduler.add(adversary)
    scheduler.add(victim)
    num_steps = 0
    while victim.status is RequestStatus.WAITING:
        for number, adversary in enumerate(adversaries):
            if adversary.is_finished or (number >= 48 and num_steps == 0):
                adversaries[number] = create_request(4, max_tokens=8, priority=-MAX_PRIORITY, tenant=str(number))
                scheduler.add(adversaries[number])
        schedule = run_step(scheduler)
        assert schedule is not None and schedule.num_bound_violations == 0
        num_steps += 1
        assert num_steps < 500
    assert victim.num_steps_waited is not None and victim.wait_bound is not None
    assert victim.num_steps_waited <= victim.wait_bound
