from dataclasses import replace

import pytest
import uvloop
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_output import FinishReason
from llm_serving.errors import CapacityError, UnavailableError
from llm_serving_simulator.http_player import MAX_TIMER_DELAY_S, play
from support.fakes import FakeEngine, Piece, Script
from support.http_serving import serving
from support.simulator_workloads import create_load

CLASSES = ServingConfig().request_classes
ANSWER = Script(pieces=[Piece("a"), Piece("b"), Piece("c"), Piece("d")], finish_reason=FinishReason.LENGTH)


def play_on(engine, load, **options):
    with serving(engine) as url:
        return uvloop.run(play(url, load, CLASSES, **options))


def test_play_sends_requests_at_their_times_and_times_the_tokens():
    engine = FakeEngine(script=ANSWER)
    result = play_on(engine, create_load(0.0, 0.05, class_name="batch", tenant="alice"))
    first, second = result.outcomes
    assert [each.finish for each in result.outcomes] == ["length", "length"]
    assert [len(each.token_times_s) for each in result.outcomes] == [4, 4]
    assert 0.05 <= second.due_s < 0.05 + MAX_TIMER_DELAY_S
    assert second.due_s <= second.token_times_s[0] <= second.end_s
    start_s = result.timings[0].due_s - first.due_s
    assert first.token_times_s == pytest.approx([each - start_s for each in result.timings[0].token_times_s])
    asked = engine.submitted[0]
    assert (asked.priority, asked.tenant, asked.prompt_token_ids) == (1, "alice", [3] * 8)
    assert (asked.sampling.max_tokens, asked.sampling.ignore_eos) == (4, True)
    assert [each.request_id for each in result.timings] == [each.request_id for each in engine.submitted]


def test_play_sends_the_cache_salt():
    engine = FakeEngine(script=ANSWER)
    play_on(engine, create_load(0.0), salt="second")
    play_on(engine, create_load(0.0))
    assert [each.cache_salt for each in engine.submitted] == ["second", ""]


def test_play_sends_the_temperature():
    engine = FakeEngine(script=ANSWER)
    play_on(engine, create_load(0.0), temperature=1.5)
    play_on(engine, create_load(0.0))
    assert [each.sampling.temperature for each in engine.submitted] == [1.5, 0.0]


def test_play_in_a_closed_loop_sends_after_an_answer():
    result = play_on(FakeEngine(script=ANSWER), create_load(*[0.0] * 5, concurrency=2))
    assert len(result.outcomes) == 5
    assert result.outcomes[2].due_s >= min(each.end_s for each in result.outcomes[:2])


def test_play_retries_refused_requests_as_the_workload_says():
    engine = FakeEngine(script=ANSWER, refusal=CapacityError("too much waits", 0.01), refuse_from=1)
    load = create_load(0.0, 0.01)
    answered, refused = play_on(engine, replace(load, retries=2)).outcomes
    assert answered.ok
    assert (refused.finish, refused.num_retries) == ("refused", 2)
    assert "too much waits" in refused.error


def test_play_aborts_unfinished_requests_and_keeps_their_token_times():
    for until_s in (0.1, 1.0, 10.0):  # a busy machine takes longer for the first tokens
        engine = FakeEngine(script=replace(ANSWER, hold_after=2))
        result = play_on(engine, create_load(0.0), until_s=until_s)
        (broken,), (timing,) = result.outcomes, result.timings
        assert broken.finish == ""
        assert not broken.ok
        if len(timing.token_times_s) == 2:  # partial results give the end of a measurement
            return
    raise AssertionError(timing)


def test_play_without_a_server_is_an_error():
    with pytest.raises(UnavailableError, match="no server answers at 127"):
        uvloop.run(play("http://127.0.0.1:1", create_load(0.0), CLASSES))
