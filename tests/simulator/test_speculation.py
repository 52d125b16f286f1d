"""Speculative decoding in a simulation: the shipping controller on the answers of the workload."""

import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from llm_serving.speculation.controller import GainModel
from llm_serving_simulator.figures import figures_of
from llm_serving_simulator.profile import CostModel, CostTerm
from llm_serving_simulator.recordings import read_recorded
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.tuner.problem import Figure, TuningObjective, search_space
from llm_serving_simulator.virtual_work_agent import VirtualSpeculationController
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream, repetitive_answer
from support.factories import create_request
from support.recordings import MemoryFiles, create_recorded
from support.simulator_workloads import STEP_S, config_with, create_profile

NUM_TOKENS = 120
FLAT = CostModel((CostTerm("step", STEP_S),))
"""A step takes the same time for any number of tokens, so every acceptable draft token is worth it."""
DEAR = CostModel((CostTerm("tokens", STEP_S),))


def create(share, num=4, seed=1):
    rng = random.Random(seed)
    requests = []
    for number in range(num):
        prompt = rng.choices(range(3, 1000), k=40)
        text = repetitive_answer(rng, prompt, NUM_TOKENS, share, 24, 1000) if share else []
        requests.append(WorkloadRequest("s", 0.1 * number, prompt, NUM_TOKENS, NUM_TOKENS, answer_token_ids=text))
    return Workload("tests", (WorkloadStream("s", requests),), vocab_size=1000)


def create_again(num):
    """Return requests one after the other, and then all of them a second time."""
    rng = random.Random(1)
    texts = 2 * [rng.choices(range(3, 1000), k=NUM_TOKENS) for _ in range(num)]
    requests = [
        WorkloadRequest(
            "s", 2.0 * number, rng.choices(range(3, 1000), k=8), NUM_TOKENS, NUM_TOKENS, answer_token_ids=text
        )
        for number, text in enumerate(texts)
    ]
    return Workload("tests", (WorkloadStream("s", requests),), vocab_size=1000)


def play(load, method="ngram", step=FLAT, **settings):
    config = config_with(scheduler_config__speculative_method=method, **settings)
    return Simulation(config, load, create_profile(step=step, num_blocks=256)).run()


def test_simulated_drafts_save_steps_and_keep_output_lengths():
    load = create(0.9)
    drafted, plain = play(load), play(load, "none")
    assert [len(each.token_times_s) for each in drafted.outcomes] == [NUM_TOKENS] * 4
    assert [each.finish for each in drafted.outcomes] == [each.finish for each in plain.outcomes]
    assert drafted.num_accepted_tokens > 100
    assert drafted.num_steps < 0.7 * plain.num_steps
    assert drafted.num_accepted_tokens == sum(NUM_TOKENS for _ in load.streams[0].requests) - _tokens_of_steps(drafted)
    assert figures_of(drafted)["tpot_p50_ms"] < 0.6 * figures_of(plain)["tpot_p50_ms"]
    assert (plain.num_draft_tokens, plain.num_accepted_tokens) == (0, 0)


def _tokens_of_steps(result):
    """Return the tokens that were computed as neither prompt nor draft tokens."""
    num_prompt = sum(each.num_prompt_tokens - each.num_cached_tokens for each in result.outcomes)
    return result.num_tokens - num_prompt - result.num_draft_tokens + len(result.outcomes)


def test_more_recited_tokens_give_more_accepted_drafts():
    shares = [play(create(share, num=8)).num_accepted_tokens / (8 * NUM_TOKENS) for share in (0.2, 0.5, 0.9)]
    assert shares == sorted(shares)
    assert shares[0] < 0.2 < shares[2] < 0.9


def test_requests_with_unknown_answers_get_no_drafts():
    token_times = [[each.token_times_s for each in play(create(0.0), method).outcomes] for method in ("ngram", "none")]
    assert token_times[0] == token_times[1]
    rng = random.Random(2)
    load = create(0.9, num=1)
    noise = WorkloadRequest("s", 0.0, rng.choices(range(3, 1000), k=40), 2000, 2000, answer_token_ids=[5])
    (stream,) = load.streams
    both = play(Workload("tests", (WorkloadStream("s", [noise, *stream.requests]),), vocab_size=1000))
    assert both.num_accepted_tokens < NUM_TOKENS


@pytest.mark.parametrize(("step_s", "every"), [(0.01, 1), (1e-4, 12)])
def test_draft_updates_are_rarer_in_shorter_steps_without_gain(monkeypatch, step_s, every):
    """The interval depends on the time of an update, as in a server."""
    num_asked, follow = [], VirtualSpeculationController._update
    monkeypatch.setattr(VirtualSpeculationController, "_update", lambda *given: num_asked.append(1) or follow(*given))
    prompt = random.Random(2).choices(range(3, 1000), k=40)
    noise = WorkloadRequest("s", 0.0, prompt, 2000, 2000, answer_token_ids=[5])
    result = play(
        Workload("tests", (WorkloadStream("s", [noise]),), vocab_size=1000), step=CostModel((CostTerm("step", step_s),))
    )
    assert result.num_draft_tokens < 0.05 * 2000
    assert result.num_steps / len(num_asked) == pytest.approx(every, rel=0.2)


def test_drafts_without_net_gain_are_not_proposed():
    load = create(0.9, num=8)
    drafted, plain = play(load, step=DEAR), play(load, "none", DEAR)
    assert drafted.num_draft_tokens < 0.1 * 8 * NUM_TOKENS
    assert figures_of(drafted)["duration_s"] == pytest.approx(figures_of(plain)["duration_s"], rel=0.02)


def test_drafts_come_from_finished_answers_of_the_same_tenant():
    rng = random.Random(3)
    text = rng.choices(range(3, 1000), k=NUM_TOKENS)
    prompts = [rng.choices(range(3, 1000), k=40) for _ in range(3)]
    requests = [
        WorkloadRequest(
            "s", 10.0 * number, prompt, NUM_TOKENS, NUM_TOKENS, tenant="ab"[number % 2], answer_token_ids=text
        )
        for number, prompt in enumerate(prompts)
    ]
    first, other, again = play(Workload("tests", (WorkloadStream("s", requests),), vocab_size=1000)).outcomes
    assert again.tpot_s < 0.5 * first.tpot_s
    assert other.tpot_s == pytest.approx(first.tpot_s)  # answers of another tenant are not used


def test_simulated_replica_allocates_slots_of_its_own_answers_only():
    few = play(create(0.9))
    tracemalloc.start()
    try:
        many = play(create(0.9), cluster_config__replicas=40)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert many.num_accepted_tokens > 0.5 * few.num_accepted_tokens
    assert peak < 40 * 2**20


def test_draft_tokens_of_a_seed_are_equal_in_every_process():
    """Some tokens of so many answers share a slot of the table, by a hash that must not vary."""
    code = (
        "import test_speculation as t; from llm_serving_simulator import virtual_work_agent as v;"
        "v.FINISHED_TOKENS = 2048;"
        "r = t.play(t.create_again(16)); print(r.num_draft_tokens, r.num_accepted_tokens, r.num_steps)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    drafts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(drafts) == 1


def create_repeated(rate, num):
    """Return requests that arrive at random and repeat thirty answers, so that nearly every draft is right."""
    rng = random.Random(1)
    texts = [rng.choices(range(3, 1000), k=rng.choice((20, 40, 60, 120))) for _ in range(30)]
    requests, due_s = [], 0.0
    for _ in range(num):
        due_s, text = due_s + rng.expovariate(rate), rng.choice(texts)
        requests.append(WorkloadRequest("s", due_s, text[:8], len(text), len(text), answer_token_ids=text))
    return Workload("tests", (WorkloadStream("s", requests),), vocab_size=1000)


def p99_s(load, method, profile):
    config = config_with(scheduler_config__speculative_method=method, model_config__decode_batch_size=32)
    outcomes = Simulation(config, load, profile).run().outcomes
    return sorted(each.token_times_s[-1] - each.due_s for each in outcomes)[-len(outcomes) // 100]


@pytest.mark.parametrize("latency_s", [0.0, 0.004])
def test_drafts_do_not_raise_the_tail_latency_at_any_load(monkeypatch, latency_s):
    """Not even where the controller cannot predict how long a step waits for the master."""
    record = GainModel.record_step
    monkeypatch.setattr(GainModel, "record_step", lambda self, num, seconds, host_s: record(self, num, seconds, 0.0))
    step = CostModel((CostTerm("step", 0.002), CostTerm("tokens", 4e-5)))
    profile = create_profile(step=step, num_blocks=4096, latency_s=latency_s)
    num = 200
    at_once = Simulation(
        config_with(scheduler_config__speculative_method="none", model_config__decode_batch_size=32),
        create_repeated(1e6, num),
        profile,
    ).run()
    capacity = num / max(each.token_times_s[-1] for each in at_once.outcomes)
    for share in (0.5, 0.8, 0.95):
        load = create_repeated(share * capacity, num)
        assert p99_s(load, "ngram", profile) <= 1.03 * p99_s(load, "none", profile), share


def test_recorded_workload_has_answers_for_drafts(tmp_path):
    """A recording without speculation has an answer that repeats itself, and one that does not."""
    files, rng = MemoryFiles(), random.Random(1)
    scheduler = create_recorded(files, num_blocks=256)
    for number, text in enumerate((list(range(50, 70)) * 4, rng.sample(range(200, 999), 80))):
        request = create_request(8, request_id=str(number), max_tokens=80, arrival_time=10.0 * number)
        request.cache_salt = "s"
        scheduler.add(request)
        for token_id in text:
            scheduler.update(scheduler.schedule(request.arrival_time), [token_id])
    (tmp_path / "a.rec").write_bytes(files.files[0])
    load = read_recorded(tmp_path / "a.rec")
    assert [each.cache_salt for each in load.streams[0].requests] == ["s", "s"]
    result = play(load)
    repeated, other = result.outcomes
    assert 40 < result.num_accepted_tokens <= 60
    assert repeated.tpot_s < 0.5 * other.tpot_s
    assert play(load, "none").num_draft_tokens == 0


def test_search_space_includes_speculation_with_known_answers():
    goal = TuningObjective(Figure("", "goodput_per_s"), maximize=True)
    has_parameter = [
        "scheduler_config.speculative_method" in [each.key for each in search_space(config_with(), create(share), goal)]
        for share in (0.5, 0.0)
    ]
    assert has_parameter == [True, False]


def test_simulation_notice_reports_that_no_draft_tokens_are_proposed():
    assert play(create(0.5)).notices == ()
    assert play(create(0.0), "none").notices == ()
    (notice,) = play(create(0.0)).notices
    assert "proposes no draft tokens: no stream of the load has `recited`" in notice
