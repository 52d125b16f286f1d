import random
from dataclasses import replace

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving_simulator.figures import figures_of
from llm_serving_simulator.tuner.problem import (
    Figure,
    FigureConstraint,
    SearchParameter,
    TuningObjective,
    as_overrides,
    search_space,
    value_of,
)
from llm_serving_simulator.tuner.search import Effect, effects_of, revert_useless_changes, search
from llm_serving_simulator.tuner.trial import INVALID_SCORE, Trial, TrialRunner, improvements, limits
from llm_serving_simulator.workload import Workload
from support.simulator_workloads import create_load, create_profile

SLOTS, GAP, BUDGET = (
    "model_config.decode_batch_size",
    "scheduler_config.max_consecutive_decode_steps",
    "scheduler_config.max_prefill_tokens",
)
MOST = TuningObjective(Figure("", "output_tokens_per_s"), maximize=True)
FIRST_TOKENS = FigureConstraint(Figure("", "ttft_p99_ms"), 100.0)


class RandomSampler:
    """Draws each parameter at random and records the scores."""

    def __init__(self, parameters: tuple[SearchParameter, ...], seed: int = 1) -> None:
        self.parameters, self.rng, self.scores = parameters, random.Random(seed), []

    def ask(self):
        return {each.key: self.rng.randrange(len(each.values)) for each in self.parameters}

    def tell(self, score):
        self.scores.append(score)


def configure(changes):
    own = {SLOTS: 4, "serving_config.audit_every": 0}
    return load_config(None, as_overrides(own | changes))


def crowd(num: int = 40) -> Workload:
    return create_load(*[0.0] * num, num_output_tokens=8, max_tokens=8)


def create_trials(goal: TuningObjective = MOST, load: Workload | None = None) -> TrialRunner:
    return TrialRunner(configure, load or crowd(), create_profile(num_blocks=512), goal)


PARAMETERS = (SearchParameter(SLOTS, (2, 4, 8, 32), 1, True), SearchParameter(GAP, (4, 16), 1, True))


def test_search_returns_the_best_trial():
    trials, sampler = create_trials(), RandomSampler(PARAMETERS)
    best = search(trials, PARAMETERS, sampler, 20)
    assert best.changes[SLOTS] == 32
    assert best.score == max(sampler.scores)


def test_search_returns_the_baseline_if_nothing_is_better():
    worse = (SearchParameter(SLOTS, (2, 4), 1, True),)
    assert search(create_trials(), worse, RandomSampler(worse), 4).changes == {}


def test_search_reverts_changes_without_effect():
    trials = create_trials()
    tuned = revert_useless_changes(trials, trials.run({SLOTS: 32, GAP: 4, "scheduler_config.quantum_steps": 8}))
    assert tuned.changes == {SLOTS: 32}
    (effect,) = effects_of(trials, tuned, {SLOTS: 4})
    assert (effect.was, effect.value) == (4, 32)
    assert effect.benefit(MOST, tuned).startswith("output_tokens_per_s would be")


def test_invalid_configuration_has_the_lowest_score_and_is_not_simulated():
    trial = create_trials().run({SLOTS: 64, BUDGET: 32})
    assert (trial.score, trial.result) == (INVALID_SCORE, None)
    many = tuple(FigureConstraint(Figure(f"tenant {number}", "ttft_p99_ms"), 1e-9) for number in range(20))
    figures = {each.figure.key: 1e9 for each in many}
    assert replace(MOST, constraints=many).score(figures, figures) > INVALID_SCORE


def test_trials_that_violate_a_constraint_stop_early_once_a_feasible_one_is_known():
    goal = replace(MOST, constraints=(replace(FIRST_TOKENS, limit=400.0),))
    trials = create_trials(goal, crowd(200))
    assert trials.run({SLOTS: 2}).result.complete  # the baseline may be the nearest value
    assert trials.run({SLOTS: 128}).feasible
    stopped = trials.run({SLOTS: 8})
    assert not stopped.result.complete
    assert stopped.score < 0
    whole = trials.run({SLOTS: 8}, to_the_end=True)
    assert whole.result.complete
    assert whole.score < 0


def test_trials_release_the_outcomes_of_requests():
    trials = create_trials()
    for slots in (4, 8):
        trial = trials.run({SLOTS: slots})
        assert trial.result.complete and not trial.result.outcomes and not trial.result.block_use
        assert figures_of(trials.full_result(trial)) == trial.figures


def test_infeasible_objective_reports_limits_and_improvements():
    goal = replace(MOST, constraints=(FIRST_TOKENS,))
    load = replace(crowd(100))
    trials = create_trials(goal, load)
    nearest = trials.run({SLOTS: 64})
    assert not nearest.feasible
    parameters = (SearchParameter(SLOTS, (4, 64), 0, True),)
    assert list(limits(nearest, parameters)) == [
        "the WorkAgents compute 100% of the time: the hardware limits",
        f"{SLOTS}: 64 is the last of the values tried",
    ]
    found = {each.description: each.figures["ttft_p99_ms"] for each in improvements(trials, nearest)}
    assert found["2 replicas in place of 1"] < nearest.figures["ttft_p99_ms"]
    assert found["steps in half the time"] < nearest.figures["ttft_p99_ms"]


def test_search_space_has_only_keys_that_affect_the_workload():
    config, load = configure({}), crowd()
    keys = {each.key for each in search_space(config, load, MOST)}
    assert SLOTS in keys
    assert not [key for key in keys if key.startswith("request_classes") or key.endswith("per_tenant")]
    assert not [key for key in keys if key.endswith(("max_waiting_queue", "slo_refusal_factor"))]
    counting = replace(MOST, constraints=(FigureConstraint(Figure("", "refused"), 0),))
    assert "scheduler_config.max_waiting_queue" in {each.key for each in search_space(config, load, counting)}
    two = replace(load, streams=(*load.streams, *create_load(0.0, class_name="batch", tenant="a").streams))
    keys = {each.key for each in search_space(config, two, replace(MOST, fixed=(SLOTS,), max_num_blocks=100))}
    assert SLOTS not in keys
    assert {"request_classes.batch.weight", "scheduler_config.max_running_per_tenant", "pa_config.num_blocks"} <= keys
    assert "request_classes.interactive.weight" not in keys
    with pytest.raises(ConfigError, match="Given: 'policy'"):
        search_space(config, load, replace(MOST, fixed=("policy",)))


def test_every_value_of_the_search_space_is_a_valid_configuration():
    load = crowd()
    two = replace(load, streams=(*load.streams, *create_load(0.0, class_name="batch", tenant="a").streams))
    config = configure({})
    goodput = TuningObjective(Figure("", "goodput_per_s"), maximize=True, max_num_blocks=4096)
    for parameter in search_space(config, two, goodput):
        for value in parameter.values:
            extra = {BUDGET: 512} if parameter.key.endswith(("decode_batch_size", "max_long_prefill_tokens")) else {}
            extra = {BUDGET: 1024} if parameter.key.endswith("long_prefill_tokens") else extra
            changed = configure({**extra, parameter.key: value} if value != parameter.current_value else {})
            assert value_of(changed, parameter.key) == value or (parameter.key.endswith("num_blocks") and value is None)


def test_effect_reports_benefit_and_cost_of_a_change():
    goal = replace(MOST, constraints=(replace(FIRST_TOKENS, limit=1000.0),))
    tuned, without = (
        Trial({}, 1.0, {"ttft_p99_ms": ttft, "output_tokens_per_s": rate, "tpot_p99_ms": 10.0})
        for ttft, rate in ((900.0, 80.0), (1100.0, 100.0))
    )
    effect = Effect(SLOTS, 4, 8, without)
    assert effect.benefit(goal, tuned) == "ttft_p99_ms would be 1,100, above 1,000"
    refused = Effect(SLOTS, 4, 8, Trial({}, INVALID_SCORE, {}))
    assert refused.benefit(goal, tuned) == "without it the other changes are invalid"
    assert effect.cost(goal, tuned) == "output_tokens_per_s 100 -> 80"
