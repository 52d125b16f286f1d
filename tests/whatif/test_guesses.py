"""What guesses bring in a simulation: those of the shipping drafter, in the texts of the load."""

import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from llm_serving.whatif.cost_model import CostModel, Piece
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.load import Asked, Load, Stream
from llm_serving.whatif.recorded_load import read_recorded
from llm_serving.whatif.simulation import Simulation
from llm_serving.whatif.tuning.goal import Figure, Goal
from llm_serving.whatif.tuning.knobs import knobs_for
from llm_serving.whatif.virtual_drafter import VirtualDrafter
from llm_serving.whatif.workload import recite
from support.factories import create_request
from support.recordings import MemoryFiles, create_recorded
from support.whatif_loads import STEP_S, config_with, create_profile

NUM_TOKENS = 120
FLAT = CostModel((Piece("step", STEP_S),))
"""A step takes the same whatever it computes, so that every guess that may be right is worth it."""
DEAR = CostModel((Piece("tokens", STEP_S),))


def create(share, num=4, seed=1):
    rng = random.Random(seed)
    requests = []
    for number in range(num):
        prompt = rng.choices(range(3, 1000), k=40)
        text = recite(rng, prompt, NUM_TOKENS, share, 24, 1000) if share else []
        requests.append(Asked("s", 0.1 * number, prompt, NUM_TOKENS, NUM_TOKENS, answer_token_ids=text))
    return Load("tests", (Stream("s", requests),), vocab_size=1000)


def create_again(num):
    """So many answers, one after the other, and then all of them again."""
    rng = random.Random(1)
    texts = 2 * [rng.choices(range(3, 1000), k=NUM_TOKENS) for _ in range(num)]
    requests = [
        Asked("s", 2.0 * number, rng.choices(range(3, 1000), k=8), NUM_TOKENS, NUM_TOKENS, answer_token_ids=text)
        for number, text in enumerate(texts)
    ]
    return Load("tests", (Stream("s", requests),), vocab_size=1000)


def play(load, method="ngram", step=FLAT, **settings):
    config = config_with(scheduler_config__speculative_method=method, **settings)
    return Simulation(config, load, create_profile(step=step, num_blocks=256)).run()


def test_guesses_make_answers_come_in_fewer_steps_and_change_no_length():
    load = create(0.9)
    guessing, plain = play(load), play(load, "none")
    assert [len(each.token_times_s) for each in guessing.outcomes] == [NUM_TOKENS] * 4
    assert [each.finish for each in guessing.outcomes] == [each.finish for each in plain.outcomes]
    assert guessing.num_right > 100
    assert guessing.num_steps < 0.7 * plain.num_steps
    assert guessing.num_right == sum(NUM_TOKENS for _ in load.streams[0].requests) - _tokens_of_steps(guessing)
    assert figures_of(guessing)["tpot_p50_ms"] < 0.6 * figures_of(plain)["tpot_p50_ms"]
    assert (plain.num_guesses, plain.num_right) == (0, 0)


def _tokens_of_steps(result):
    """Tokens that were not guessed: of the tokens computed those that are neither of a prompt nor guesses."""
    num_prompt = sum(each.num_prompt_tokens - each.num_cached_tokens for each in result.outcomes)
    return result.num_tokens - num_prompt - result.num_guesses + len(result.outcomes)


def test_the_more_is_recited_the_more_is_guessed_rightly():
    shares = [play(create(share, num=8)).num_right / (8 * NUM_TOKENS) for share in (0.2, 0.5, 0.9)]
    assert shares == sorted(shares)
    assert shares[0] < 0.2 < shares[2] < 0.9


def test_what_nobody_can_know_is_not_guessed():
    told = [[each.token_times_s for each in play(create(0.0), method).outcomes] for method in ("ngram", "none")]
    assert told[0] == told[1]
    rng = random.Random(2)
    load = create(0.9, num=1)
    noise = Asked("s", 0.0, rng.choices(range(3, 1000), k=40), 2000, 2000, answer_token_ids=[5])
    (stream,) = load.streams
    both = play(Load("tests", (Stream("s", [noise, *stream.requests]),), vocab_size=1000))
    assert both.num_right < NUM_TOKENS


@pytest.mark.parametrize(("step_s", "every"), [(0.01, 2), (1e-4, 12)])
def test_guesses_that_do_not_pay_are_asked_for_the_more_seldom_the_shorter_steps_are(monkeypatch, step_s, every):
    """As in a server, by what the asking takes."""
    num_asked, follow = [], VirtualDrafter._follow
    monkeypatch.setattr(VirtualDrafter, "_follow", lambda *given: num_asked.append(1) or follow(*given))
    prompt = random.Random(2).choices(range(3, 1000), k=40)
    noise = Asked("s", 0.0, prompt, 2000, 2000, answer_token_ids=[5])
    result = play(Load("tests", (Stream("s", [noise]),), vocab_size=1000), step=CostModel((Piece("step", step_s),)))
    assert result.num_guesses < 0.05 * 2000
    assert result.num_steps / len(num_asked) == pytest.approx(every, rel=0.2)


def test_guesses_that_cost_what_they_bring_are_not_made():
    load = create(0.9, num=8)
    guessing, plain = play(load, step=DEAR), play(load, "none", DEAR)
    assert guessing.num_guesses < 0.1 * 8 * NUM_TOKENS
    assert figures_of(guessing)["duration_s"] == pytest.approx(figures_of(plain)["duration_s"], rel=0.02)


def test_a_recited_answer_of_one_is_found_in_that_of_another():
    rng = random.Random(3)
    text = rng.choices(range(3, 1000), k=NUM_TOKENS)
    prompts = [rng.choices(range(3, 1000), k=40) for _ in range(3)]
    requests = [
        Asked("s", 10.0 * number, prompt, NUM_TOKENS, NUM_TOKENS, tenant="ab"[number % 2], answer_token_ids=text)
        for number, prompt in enumerate(prompts)
    ]
    first, other, again = play(Load("tests", (Stream("s", requests),), vocab_size=1000)).outcomes
    assert again.tpot_s < 0.5 * first.tpot_s
    assert other.tpot_s == pytest.approx(first.tpot_s)  # another tenant's answers are not looked in


def test_a_replica_takes_memory_for_what_was_answered_there_and_no_more():
    few = play(create(0.9))
    tracemalloc.start()
    try:
        many = play(create(0.9), cluster_config__replicas=40)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert many.num_right > 0.5 * few.num_right
    assert peak < 40 * 2**20


def test_the_same_seed_guesses_the_same_in_every_process():
    """So many answers that some of their tokens share a slot of the table, by a hash that must not differ."""
    code = (
        "import test_guesses as t; from llm_serving.whatif import virtual_drafter as v; v.FINISHED_TOKENS = 2048;"
        "r = t.play(t.create_again(16)); print(r.num_guesses, r.num_right, r.num_steps)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_a_recording_has_the_texts_and_says_what_guesses_would_have_brought(tmp_path):
    """Of a server that guessed nothing: a text that repeats itself, and one that does not."""
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
    assert 40 < result.num_right <= 60
    assert repeated.tpot_s < 0.5 * other.tpot_s
    assert play(load, "none").num_guesses == 0


def test_a_search_turns_guesses_where_there_may_be_some():
    goal = Goal(Figure("", "goodput_per_s"), most=True)
    has_knob = [
        "scheduler_config.speculative_method" in [each.key for each in knobs_for(config_with(), create(share), goal)]
        for share in (0.5, 0.0)
    ]
    assert has_knob == [True, False]


def test_what_of_guesses_is_not_simulated_is_told():
    assert play(create(0.5)).notices == ()
    assert play(create(0.0), "none").notices == ()
    (notice,) = play(create(0.0)).notices
    assert "guesses nothing: no stream of the load has `recited`" in notice
