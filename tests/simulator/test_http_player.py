from dataclasses import replace

import pytest
import uvloop
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_output import FinishReason
from llm_serving.errors import CapacityError, UnavailableError
from llm_serving_simulator.http_player import TIMER_S, play
from support.fakes import FakeEngine, Piece, Script
from support.http_serving import serving
from support.simulator_workloads import create_load

CLASSES = ServingConfig().request_classes
ANSWER = Script(pieces=[Piece("a"), Piece("b"), Piece("c"), Piece("d")], finish_reason=FinishReason.LENGTH)


def played(engine, load, **options):
    with serving(engine) as url:
        return uvloop.run(play(url, load, CLASSES, **options))


def test_requests_are_sent_as_the_load_says_and_answers_timed():
    engine = FakeEngine(script=ANSWER)
    result = played(engine, create_load(0.0, 0.05, class_name="batch", tenant="alice"))
    first, second = result.outcomes
    assert [each.finish for each in result.outcomes] == ["length", "length"]
    assert [len(each.token_times_s) for each in result.outcomes] == [4, 4]
    assert 0.05 <= second.due_s < 0.05 + TIMER_S
    assert second.due_s <= second.token_times_s[0] <= second.end_s
    began_s = result.seen[0].due_s - first.due_s
    assert first.token_times_s == pytest.approx([each - began_s for each in result.seen[0].token_times_s])
    asked = engine.submitted[0]
    assert (asked.priority, asked.tenant, asked.prompt_token_ids) == (1, "alice", [3] * 8)
    assert (asked.sampling.max_tokens, asked.sampling.ignore_eos) == (4, True)
    assert [each.request_id for each in result.seen] == [each.request_id for each in engine.submitted]


def test_a_salt_keeps_what_was_computed_for_others_from_a_load():
    engine = FakeEngine(script=ANSWER)
    played(engine, create_load(0.0), salt="second")
    played(engine, create_load(0.0))
    assert [each.cache_salt for each in engine.submitted] == ["second", ""]


def test_answers_are_drawn_at_the_temperature_that_is_asked_for():
    engine = FakeEngine(script=ANSWER)
    played(engine, create_load(0.0), temperature=1.5)
    played(engine, create_load(0.0))
    assert [each.sampling.temperature for each in engine.submitted] == [1.5, 0.0]


def test_a_closed_loop_asks_again_when_it_has_been_answered():
    result = played(FakeEngine(script=ANSWER), create_load(*[0.0] * 5, concurrency=2))
    assert len(result.outcomes) == 5
    assert result.outcomes[2].due_s >= min(each.end_s for each in result.outcomes[:2])


def test_who_is_refused_comes_again_as_often_as_the_load_says():
    engine = FakeEngine(script=ANSWER, refusal=CapacityError("too much waits", 0.01), refuse_from=1)
    load = create_load(0.0, 0.01)
    answered, refused = played(engine, replace(load, retries=2)).outcomes
    assert answered.ok
    assert (refused.finish, refused.num_retries) == ("refused", 2)
    assert "too much waits" in refused.error


def test_what_is_not_answered_in_time_is_broken_off():
    for until_s in (0.1, 1.0, 10.0):  # a busy machine takes longer for the first tokens
        engine = FakeEngine(script=replace(ANSWER, hold_after=2))
        result = played(engine, create_load(0.0), until_s=until_s)
        (broken,), (seen,) = result.outcomes, result.seen
        assert broken.finish == ""
        assert not broken.ok
        if len(seen.token_times_s) == 2:  # what had come of it tells until when something was measured
            return
    raise AssertionError(seen)


def test_no_server_is_an_error():
    with pytest.raises(UnavailableError, match="no server answers at 127"):
        uvloop.run(play("http://127.0.0.1:1", create_load(0.0), CLASSES))
