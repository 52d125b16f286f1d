from dataclasses import replace

import pytest
from llm_serving.errors import ConfigError
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.whatif.cost_model import CostModel, Piece
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.simulation import ContradictionError
from whatif_loads import STEP_S, create_load, create_profile, simulate

SLOTS = {"model_config__decode_batch_size": 4}


def test_a_request_alone_takes_what_its_steps_take():
    (outcome,) = simulate(create_load(1.0)).outcomes
    assert outcome.finish == "length"
    first, each = STEP_S + 8 * 0.0001, STEP_S + 0.0001
    assert outcome.token_times_s == pytest.approx(
        [1 + first, 1 + first + each, 1 + first + 2 * each, 1 + first + 3 * each]
    )


def test_the_model_ends_an_answer_before_its_limit():
    (outcome,) = simulate(create_load(0.0, num_output_tokens=3, max_tokens=50)).outcomes
    assert (outcome.finish, len(outcome.token_times_s)) == ("stop", 3)


def test_times_of_master_loop_and_client_are_added():
    profile = create_profile(
        form=CostModel((Piece("step", 0.001),)),
        take=CostModel((Piece("rows", 0.002),)),
        latency_s=0.0001,
        request_s=0.003,
        token_s=0.004,
        client_s=0.005,
    )
    (outcome,) = simulate(create_load(0.0, num_output_tokens=1, max_tokens=1), profile).outcomes
    step = 0.001 + 2 * 0.0001 + STEP_S + 8 * 0.0001 + 0.002
    assert outcome.ttft_s == pytest.approx(0.003 + 0.004 + 2 * 0.005 + step)


def test_a_step_takes_longer_for_what_the_master_does_beside_it():
    """The second request is read while the first step is computed, and each token sent during the step after it."""
    step = CostModel((Piece("step", STEP_S), Piece("sent", 0.001), Piece("read", 0.002)))
    settings = {"scheduler_config__policy": "prefill_first"}
    first, second = simulate(create_load(0.0, STEP_S / 2), create_profile(step=step), **settings).outcomes
    times = sorted({*first.token_times_s, *second.token_times_s})
    assert times[0] == pytest.approx(STEP_S + 0.002)
    assert times[1] - times[0] == pytest.approx(STEP_S + 0.001)


def test_a_server_that_has_rested_wakes_and_begins_later():
    profile = create_profile(idle_s=0.003, wake_s=0.001)
    load = create_load(0.0, 1.0, 1.05, num_output_tokens=2, max_tokens=2)
    first, second, soon = simulate(load, profile).outcomes
    usual = STEP_S + 8 * 0.0001
    assert [each.ttft_s for each in (first, second)] == pytest.approx([usual + 0.004] * 2)
    assert soon.ttft_s == pytest.approx(usual + 0.001)  # it has rested for 25 ms only
    assert second.token_times_s[1] - second.token_times_s[0] == pytest.approx(STEP_S + 0.0001)


def test_forming_a_step_ahead_hides_what_it_takes():
    profile = create_profile(form=CostModel((Piece("step", 0.004),)), num_blocks=64)
    ahead, after = (
        figures_of(simulate(create_load(0.0), profile, scheduler_config__schedule_ahead=each))["tpot_p50_ms"]
        for each in (True, False)
    )
    assert after - ahead == pytest.approx(4.0)


def test_the_same_seed_gives_the_same_times_and_another_others():
    profile = create_profile(spread=(0.5, 1.0, 2.0))
    load = create_load(*(0.01 * number for number in range(20)), num_prompt=24)
    times = [[each.token_times_s for each in simulate(load, profile, seed).outcomes] for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_a_closed_loop_asks_again_when_it_has_been_answered():
    outcomes = simulate(create_load(*[0.5] * 5, concurrency=2)).outcomes
    assert [each.due_s for each in outcomes[:2]] == [0.5, 0.5]
    assert [each.due_s for each in outcomes[2:4]] == [each.end_s for each in outcomes[:2]]


def test_replicas_share_a_load():
    load = create_load(*[0.0] * 16, num_output_tokens=16, max_tokens=16)
    slots = {"model_config__decode_batch_size": 4}
    one, two = (simulate(load, serving_config__agent_ports=ports, **slots) for ports in ("[1]", "[1,2]"))
    assert max(each.end_s for each in two.outcomes) == pytest.approx(
        max(each.end_s for each in one.outcomes) / 2, rel=0.1
    )
    counted = simulate(load, cluster_config__replicas=2, **slots)
    assert [each.end_s for each in counted.outcomes] == [each.end_s for each in two.outcomes]


def test_a_full_queue_refuses_and_who_comes_again_is_served():
    load = create_load(*[0.0] * 6, num_output_tokens=20, max_tokens=20)
    settings = {"model_config__decode_batch_size": 1, "scheduler_config__max_waiting_queue": 2}
    refused = [each for each in simulate(load, **settings).outcomes if each.finish == "refused"]
    assert len(refused) >= 3
    assert "max_waiting_queue" in refused[0].error
    again = simulate(replace(load, retries=100), **settings)
    assert all(each.ok for each in again.outcomes)
    assert figures_of(again)["retries"] > 0


def test_a_deadline_ends_a_request():
    (outcome,) = simulate(create_load(0.0, num_output_tokens=50, max_tokens=50, timeout_s=0.1)).outcomes
    assert outcome.finish == "timeout"
    assert outcome.end_s == pytest.approx(0.1, abs=2 * STEP_S)


def test_a_cache_too_small_preempts_and_all_are_answered():
    load = create_load(*[0.0] * 8, num_prompt=16, num_output_tokens=64, max_tokens=64)
    result = simulate(load, create_profile(num_blocks=16))
    assert result.preemptions > 0
    assert result.bound_violations == 0
    assert all(each.ok for each in result.outcomes)
    assert figures_of(result)["block_use_peak"] == 1.0


def test_a_class_that_the_configuration_has_not_is_named():
    with pytest.raises(ConfigError, match=r"stream s must be one of .*: batch, interactive, standard. Given: .vip"):
        simulate(create_load(0.0, class_name="vip"))


def test_blocks_must_be_known():
    with pytest.raises(ConfigError, match=r"pa_config\.num_blocks must be given"):
        simulate(create_load(0.0), create_profile(num_blocks=None))


def test_a_contradiction_stops_with_its_seed(monkeypatch):
    def broken(self: Scheduler) -> None:
        raise AssertionError("a block is lost")

    monkeypatch.setattr(Scheduler, "check_integrity", broken)
    with pytest.raises(ContradictionError, match="seed 7: a block is lost"):
        simulate(create_load(0.0), seed=7)


@pytest.mark.parametrize("replicas", [1, 2])
def test_leaving_out_predictions_that_decide_nothing_changes_nothing(replicas):
    load = create_load(*(0.005 * number for number in range(60)), num_output_tokens=20, max_tokens=30)
    settings = SLOTS | {"cluster_config__replicas": replicas}
    plain, predicting = (
        [each.token_times_s for each in simulate(load, scheduler_config__slo_refusal_factor=each, **settings).outcomes]
        for each in ("null", 1000000.0)
    )
    assert plain == predicting


def test_requests_move_between_replicas_that_have_roles():
    roles = {"cluster_config__replicas": 2, "cluster_config__roles": "[prefill, decode]"}
    outcomes = simulate(create_load(0.0, 0.001, 0.002), **roles).outcomes
    assert [each.finish for each in outcomes] == ["length"] * 3
