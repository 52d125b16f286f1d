import random
from dataclasses import replace

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving_simulator.figures import figures_of
from llm_serving_simulator.load import Load
from llm_serving_simulator.tuner.ablation import Effect, effects, put_back
from llm_serving_simulator.tuner.goal import Constraint, Figure, Goal
from llm_serving_simulator.tuner.knobs import Knob, as_overrides, knobs_for, value_of
from llm_serving_simulator.tuner.limits import limits, reliefs
from llm_serving_simulator.tuner.search import search
from llm_serving_simulator.tuner.trial import UNUSABLE, Trial, Trials
from support.simulator_workloads import create_load, create_profile

SLOTS, GAP, BUDGET = (
    "model_config.decode_batch_size",
    "scheduler_config.max_consecutive_decode_steps",
    "scheduler_config.max_prefill_tokens",
)
MOST = Goal(Figure("", "output_tokens_per_s"), most=True)
FIRST_TOKENS = Constraint(Figure("", "ttft_p99_ms"), 100.0)


class Chance:
    """Draws each knob, and remembers what it is told."""

    def __init__(self, knobs: tuple[Knob, ...], seed: int = 1) -> None:
        self.knobs, self.rng, self.scores = knobs, random.Random(seed), []

    def ask(self):
        return {each.key: self.rng.randrange(len(each.values)) for each in self.knobs}

    def tell(self, score):
        self.scores.append(score)


def configure(changes):
    own = {SLOTS: 4, "serving_config.audit_every": 0}
    return load_config(None, as_overrides(own | changes))


def crowd(num: int = 40) -> Load:
    return create_load(*[0.0] * num, num_output_tokens=8, max_tokens=8)


def create_trials(goal: Goal = MOST, load: Load | None = None) -> Trials:
    return Trials(configure, load or crowd(), create_profile(num_blocks=512), goal)


KNOBS = (Knob(SLOTS, (2, 4, 8, 32), 1, True), Knob(GAP, (4, 16), 1, True))


def test_the_best_of_what_was_tried_is_found():
    trials, sampler = create_trials(), Chance(KNOBS)
    best = search(trials, KNOBS, sampler, 20)
    assert best.changes[SLOTS] == 32
    assert best.score == max(sampler.scores)


def test_nothing_better_leaves_the_configuration_as_it_is():
    worse = (Knob(SLOTS, (2, 4), 1, True),)
    assert search(create_trials(), worse, Chance(worse), 4).changes == {}


def test_changes_that_bring_nothing_are_taken_back():
    trials = create_trials()
    tuned = put_back(trials, trials.of({SLOTS: 32, GAP: 4, "scheduler_config.quantum_steps": 8}))
    assert tuned.changes == {SLOTS: 32}
    (effect,) = effects(trials, tuned, {SLOTS: 4})
    assert (effect.was, effect.value) == (4, 32)
    assert effect.brings(MOST, tuned).startswith("output_tokens_per_s would be")


def test_a_refused_configuration_scores_worst_and_is_not_simulated():
    trial = create_trials().of({SLOTS: 64, BUDGET: 32})
    assert (trial.score, trial.result) == (UNUSABLE, None)
    many = tuple(Constraint(Figure(f"tenant {number}", "ttft_p99_ms"), 1e-9) for number in range(20))
    figures = {each.figure.key: 1e9 for each in many}
    assert replace(MOST, constraints=many).score(figures, figures) > UNUSABLE


def test_hopeless_trials_are_given_up_once_a_feasible_one_is_known():
    goal = replace(MOST, constraints=(replace(FIRST_TOKENS, limit=400.0),))
    trials = create_trials(goal, crowd(200))
    assert trials.of({SLOTS: 2}).result.complete  # the nearest may be this one
    assert trials.of({SLOTS: 128}).feasible
    given_up = trials.of({SLOTS: 8})
    assert not given_up.result.complete
    assert given_up.score < 0
    whole = trials.of({SLOTS: 8}, to_the_end=True)
    assert whole.result.complete
    assert whole.score < 0


def test_what_came_of_each_request_is_not_kept_of_all_trials():
    trials = create_trials()
    for slots in (4, 8):
        trial = trials.of({SLOTS: slots})
        assert trial.result.complete and not trial.result.outcomes and not trial.result.block_use
        assert figures_of(trials.whole(trial)) == trial.figures


def test_what_would_help_an_infeasible_goal_is_told():
    goal = replace(MOST, constraints=(FIRST_TOKENS,))
    load = replace(crowd(100))
    trials = create_trials(goal, load)
    nearest = trials.of({SLOTS: 64})
    assert not nearest.feasible
    knobs = (Knob(SLOTS, (4, 64), 0, True),)
    assert list(limits(nearest, knobs)) == [
        "the WorkAgents compute 100% of the time: the hardware limits",
        f"{SLOTS}: 64 is the last of the values tried",
    ]
    found = {each.what: each.figures["ttft_p99_ms"] for each in reliefs(trials, nearest)}
    assert found["2 replicas in place of 1"] < nearest.figures["ttft_p99_ms"]
    assert found["steps in half the time"] < nearest.figures["ttft_p99_ms"]


def test_knobs_are_those_that_matter_to_the_load():
    config, load = configure({}), crowd()
    keys = {each.key for each in knobs_for(config, load, MOST)}
    assert SLOTS in keys
    assert not [key for key in keys if key.startswith("request_classes") or key.endswith("per_tenant")]
    assert not [key for key in keys if key.endswith(("max_waiting_queue", "slo_refusal_factor"))]
    counting = replace(MOST, constraints=(Constraint(Figure("", "refused"), 0),))
    assert "scheduler_config.max_waiting_queue" in {each.key for each in knobs_for(config, load, counting)}
    two = replace(load, streams=(*load.streams, *create_load(0.0, class_name="batch", tenant="a").streams))
    keys = {each.key for each in knobs_for(config, two, replace(MOST, fixed=(SLOTS,), max_num_blocks=100))}
    assert SLOTS not in keys
    assert {"request_classes.batch.weight", "scheduler_config.max_running_per_tenant", "pa_config.num_blocks"} <= keys
    assert "request_classes.interactive.weight" not in keys
    with pytest.raises(ConfigError, match="Given: 'policy'"):
        knobs_for(config, load, replace(MOST, fixed=("policy",)))


def test_every_value_of_a_knob_is_one_that_the_configuration_takes():
    load = crowd()
    two = replace(load, streams=(*load.streams, *create_load(0.0, class_name="batch", tenant="a").streams))
    config = configure({})
    goodput = Goal(Figure("", "goodput_per_s"), most=True, max_num_blocks=4096)
    for knob in knobs_for(config, two, goodput):
        for value in knob.values:
            extra = {BUDGET: 512} if knob.key.endswith(("decode_batch_size", "max_long_prefill_tokens")) else {}
            extra = {BUDGET: 1024} if knob.key.endswith("long_prefill_tokens") else extra
            changed = configure({**extra, knob.key: value} if value != knob.own_value else {})
            assert value_of(changed, knob.key) == value or (knob.key.endswith("num_blocks") and value is None)


def test_what_a_change_costs_the_objective_is_no_gain():
    goal = replace(MOST, constraints=(replace(FIRST_TOKENS, limit=1000.0),))
    tuned, without = (
        Trial({}, 1.0, {"ttft_p99_ms": ttft, "output_tokens_per_s": rate, "tpot_p99_ms": 10.0})
        for ttft, rate in ((900.0, 80.0), (1100.0, 100.0))
    )
    effect = Effect(SLOTS, 4, 8, without)
    assert effect.brings(goal, tuned) == "ttft_p99_ms would be 1,100, above 1,000"
    refused = Effect(SLOTS, 4, 8, Trial({}, UNUSABLE, {}))
    assert refused.brings(goal, tuned) == "it would be refused beside the other changes"
    assert effect.costs(goal, tuned) == "output_tokens_per_s 100 -> 80"
