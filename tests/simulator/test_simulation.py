from dataclasses import replace

import pytest
from llm_serving.admission.admission_control import AdmissionControl
from llm_serving.errors import ConfigError, TooLateError
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.scheduler.stages import DecodeStage
from llm_serving_simulator.figures import figures_of
from llm_serving_simulator.profile import CostModel, CostTerm
from llm_serving_simulator.simulation import InconsistencyError, Simulation
from support.simulator_workloads import STEP_S, create_load, create_profile, simulate

SLOTS = {"model_config__decode_batch_size": 4}


def test_simulated_request_alone_takes_the_time_of_its_steps():
    (outcome,) = simulate(create_load(1.0)).outcomes
    assert outcome.finish == "length"
    first, each = STEP_S + 8 * 0.0001, STEP_S + 0.0001
    assert outcome.token_times_s == pytest.approx(
        [1 + first, 1 + first + each, 1 + first + 2 * each, 1 + first + 3 * each]
    )


def test_simulated_model_ends_an_answer_before_max_tokens():
    (outcome,) = simulate(create_load(0.0, num_output_tokens=3, max_tokens=50)).outcomes
    assert (outcome.finish, len(outcome.token_times_s)) == ("stop", 3)


def test_simulated_latency_is_the_sum_of_master_loop_and_client():
    profile = create_profile(
        form=CostModel((CostTerm("step", 0.001),)),
        take=CostModel((CostTerm("rows", 0.002),)),
        latency_s=0.0001,
        request_s=0.003,
        token_s=0.004,
        client_s=0.005,
    )
    (outcome,) = simulate(create_load(0.0, num_output_tokens=1, max_tokens=1), profile).outcomes
    step = 0.001 + 2 * 0.0001 + STEP_S + 8 * 0.0001 + 0.002
    assert outcome.ttft_s == pytest.approx(0.003 + 0.004 + 2 * 0.005 + step)


def test_simulated_step_is_slower_during_event_loop_work():
    """The second request is read while the first step runs, and each token is sent while the step after it runs."""
    step = CostModel((CostTerm("step", STEP_S), CostTerm("sent", 0.001), CostTerm("read", 0.002)))
    settings = {"scheduler_config__policy": "prefill_first"}
    first, second = simulate(create_load(0.0, STEP_S / 2), create_profile(step=step), **settings).outcomes
    times = sorted({*first.token_times_s, *second.token_times_s})
    assert times[0] == pytest.approx(STEP_S + 0.002)
    assert times[1] - times[0] == pytest.approx(STEP_S + 0.001)


def test_simulated_idle_server_starts_later():
    profile = create_profile(idle_s=0.003, wake_s=0.001)
    load = create_load(0.0, 1.0, 1.05, num_output_tokens=2, max_tokens=2)
    first, second, soon = simulate(load, profile).outcomes
    usual = STEP_S + 8 * 0.0001
    assert [each.ttft_s for each in (first, second)] == pytest.approx([usual + 0.004] * 2)
    assert soon.ttft_s == pytest.approx(usual + 0.001)  # the server was idle for 25 ms only
    assert second.token_times_s[1] - second.token_times_s[0] == pytest.approx(STEP_S + 0.0001)


def test_simulated_scheduling_ahead_hides_its_time():
    profile = create_profile(form=CostModel((CostTerm("step", 0.004),)), num_blocks=64)
    ahead, after = (
        figures_of(simulate(create_load(0.0), profile, scheduler_config__async_scheduling=each))["tpot_p50_ms"]
        for each in (True, False)
    )
    assert after - ahead == pytest.approx(4.0)


def test_simulated_times_depend_on_the_seed():
    profile = create_profile(spread=(0.5, 1.0, 2.0))
    load = create_load(*(0.01 * number for number in range(20)), num_prompt=24)
    times = [[each.token_times_s for each in simulate(load, profile, seed).outcomes] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_simulated_closed_loop_sends_after_an_answer():
    outcomes = simulate(create_load(*[0.5] * 5, concurrency=2)).outcomes
    assert [each.due_s for each in outcomes[:2]] == [0.5, 0.5]
    assert [each.due_s for each in outcomes[2:4]] == [each.end_s for each in outcomes[:2]]


def test_simulated_replicas_share_the_workload():
    load = create_load(*[0.0] * 16, num_output_tokens=16, max_tokens=16)
    slots = {"model_config__decode_batch_size": 4}
    one, two = (simulate(load, serving_config__agent_ports=ports, **slots) for ports in ("[1]", "[1,2]"))
    assert max(each.end_s for each in two.outcomes) == pytest.approx(
        max(each.end_s for each in one.outcomes) / 2, rel=0.1
    )
    counted = simulate(load, cluster_config__replicas=2, **slots)
    assert [each.end_s for each in counted.outcomes] == [each.end_s for each in two.outcomes]


@pytest.mark.parametrize("roles", [{}, {"cluster_config__roles": "[prefill, decode, both]"}])
def test_simulation_steps_the_replica_with_the_earliest_time(roles, monkeypatch):
    num_chosen, choose, run_until = 0, Simulation._next, Simulation.run_until
    until = []

    def chosen(self):
        nonlocal num_chosen
        replica = choose(self)
        if replica is not None:
            assert replica is min(self._replicas, key=lambda each: each.wake_time)
            num_chosen += 1
        return replica

    def let(self, time, clock):
        behind = min(each.wake_time for each in self._replicas if each.clock is not clock)
        with monkeypatch.context() as patch:
            run = self._events.run_until
            patch.setattr(
                self._events, "run_until", lambda given: until.append(given == min(time, behind)) or run(given)
            )
            run_until(self, time, clock)

    monkeypatch.setattr(Simulation, "_next", chosen)
    monkeypatch.setattr(Simulation, "run_until", let)
    load = create_load(*(0.004 * number for number in range(30)), num_output_tokens=9, max_tokens=9, timeout_s=0.3)
    assert len(simulate(load, cluster_config__replicas=3, **SLOTS, **roles).outcomes) == 30
    assert num_chosen > 50 and len(until) > 50 and all(until)


def test_simulated_full_queue_refuses_and_serves_retries():
    load = create_load(*[0.0] * 6, num_output_tokens=20, max_tokens=20)
    settings = {"model_config__decode_batch_size": 1, "scheduler_config__max_waiting_queue": 2}
    refused = [each for each in simulate(load, **settings).outcomes if each.finish == "refused"]
    assert len(refused) >= 3
    assert "max_waiting_queue" in refused[0].error
    again = simulate(replace(load, retries=100), **settings)
    assert all(each.ok for each in again.outcomes)
    assert figures_of(again)["retries"] > 0


def test_simulated_deadline_ends_a_request():
    (outcome,) = simulate(create_load(0.0, num_output_tokens=50, max_tokens=50, timeout_s=0.1)).outcomes
    assert outcome.finish == "timeout"
    assert outcome.end_s == pytest.approx(0.1, abs=2 * STEP_S)


def test_simulated_small_cache_preempts_and_answers_all():
    load = create_load(*[0.0] * 8, num_prompt=16, num_output_tokens=64, max_tokens=64)
    result = simulate(load, create_profile(num_blocks=16))
    assert result.preemptions > 0
    assert result.bound_violations == 0
    assert all(each.ok for each in result.outcomes)
    assert figures_of(result)["block_use_peak"] == 1.0


def test_simulation_error_names_an_unknown_class():
    with pytest.raises(ConfigError, match=r"stream s must be one of .*: batch, interactive, standard. Given: .vip"):
        simulate(create_load(0.0, class_name="vip"))


def test_simulation_needs_the_number_of_blocks():
    with pytest.raises(ConfigError, match=r"pa_config\.num_blocks must be given"):
        simulate(create_load(0.0), create_profile(num_blocks=None))


def test_simulation_error_has_the_seed_of_an_inconsistency(monkeypatch):
    def broken(self: Scheduler) -> None:
        raise AssertionError("a block is lost")

    monkeypatch.setattr(Scheduler, "check_integrity", broken)
    with pytest.raises(InconsistencyError, match="seed 7: a block is lost"):
        simulate(create_load(0.0), seed=7)


def test_simulation_error_has_the_seed_of_a_bound_violation(monkeypatch):
    monkeypatch.setattr(DecodeStage, "count_gap_violations", lambda *_: 1)
    with pytest.raises(InconsistencyError, match="seed 7: a bound on waiting is broken at 0"):
        simulate(create_load(0.0), seed=7)


def test_simulated_refused_requests_retry_until_admitted():
    load = create_load(*[0.001 * number for number in range(6)], num_output_tokens=20, max_tokens=20, retries=100)
    result = simulate(load, model_config__decode_batch_size=1, scheduler_config__max_waiting_queue=2)
    assert all(each.ok for each in result.outcomes)
    assert figures_of(result)["retries"] > 0


def test_simulated_retries_wait_for_whole_seconds(monkeypatch):
    refusals = iter([TooLateError("it would come after its deadline", 1.3)])

    def check_deadline(*_):
        for error in refusals:
            raise error

    monkeypatch.setattr(AdmissionControl, "check_deadline", check_deadline)
    (again,) = simulate(create_load(0.0, timeout_s=9.0, retries=1)).outcomes
    assert (again.ok, again.num_retries) == (True, 1)
    assert 2.0 < again.token_times_s[0] < 2.1


def test_simulated_number_of_blocks_follows_the_block_size():
    profile = create_profile(num_blocks=64, block_size=16)
    settings = [{}, {"pa_config__block_size": 32}, {"pa_config__block_size": 32, "pa_config__num_blocks": 64}]
    assert [simulate(create_load(0.0), profile, **each).num_blocks for each in settings] == [64, 32, 64]


def test_simulation_reports_that_rate_limits_are_not_simulated():
    key = {"api_keys__a__key_sha256": "a" * 64, "scheduler_config__speculative_method": "none"}
    assert simulate(create_load(0.0), **key).notices == ()
    (notice,) = simulate(create_load(0.0), **key, api_keys__a__max_requests_per_minute=1).notices
    assert notice.startswith("rate limits of api_keys are not simulated")


@pytest.mark.parametrize("replicas", [1, 2])
def test_simulation_without_predictions_is_equal_if_nothing_uses_them(replicas):
    load = create_load(*(0.005 * number for number in range(60)), num_output_tokens=20, max_tokens=30)
    settings = SLOTS | {"cluster_config__replicas": replicas}
    plain, predicting = (
        [each.token_times_s for each in simulate(load, scheduler_config__slo_refusal_factor=each, **settings).outcomes]
        for each in ("null", 1000000.0)
    )
    assert plain == predicting


def test_simulated_requests_migrate_between_replicas_with_roles():
    roles = {"cluster_config__replicas": 2, "cluster_config__roles": "[prefill, decode]"}
    outcomes = simulate(create_load(0.0, 0.001, 0.002), **roles).outcomes
    assert [each.finish for each in outcomes] == ["length"] * 3
