"""The parts of the scheduling experiments that need no server."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from experiments import measures
from experiments.bench import (
    Bench,
    Served,
    ServerError,
    Trial,
    draw_groups,
    long_prompts,
    make_job,
    merge_schedules,
    parse_counters,
    short_questions,
)
from experiments.results import Table, cell, document
from load_test.api_client import GenerationOptions
from load_test.http_client import HttpClient
from load_test.metrics import Attempt, RequestRecord, ServiceLevel
from load_test.runner import Load, run_load
from load_test.workload import Prompt

QUESTIONS = [Prompt("Sort these words: sail rocket beach.", "beach rocket sail"), Prompt("Add 1 and 2.", "3")]


def make_record(task: str, *token_times_s: float, prompt: str = "p") -> RequestRecord:
    end_s = token_times_s[-1]
    return RequestRecord(0, prompt, task, None, 0.0, 0.0, end_s, token_times_s, len(token_times_s))


def test_draw_groups_allocates_by_largest_remainder():
    names = draw_groups(17, {"short": 0.1, "medium": 0.8, "long": 0.1}, random.Random(1))
    assert {name: names.count(name) for name in set(names)} == {"short": 2, "medium": 13, "long": 2}
    names = draw_groups(16, {"short": 0.1, "medium": 0.8, "long": 0.1}, random.Random(1))
    assert {name: names.count(name) for name in set(names)} == {"short": 2, "medium": 13, "long": 1}


def test_draw_groups_order_follows_the_seed():
    weights = {"a": 1.0, "b": 1.0}
    assert draw_groups(40, weights, random.Random(1)) == draw_groups(40, weights, random.Random(1))
    assert draw_groups(40, weights, random.Random(1)) != draw_groups(40, weights, random.Random(2))


def test_long_prompts_differ_in_their_first_word():
    prompts = long_prompts(QUESTIONS, 4, 50, random.Random(3))
    assert [len(prompt.text.split()) for prompt in prompts] == [50] * 4
    assert len({prompt.text.split()[0] for prompt in prompts}) == 4


def test_short_questions_have_short_expected_answers():
    assert short_questions(QUESTIONS) == [QUESTIONS[1]]


def test_schedules_are_merged_by_due_time():
    a, b = make_job(QUESTIONS[0], "a", 5), make_job(QUESTIONS[1], "b", 5, user="b")
    jobs, due_times_s = merge_schedules(([a, a], [0.0, 2.0]), ([b], [1.0]))
    assert [job.prompt.task for job in jobs] == ["a", "b", "a"]
    assert due_times_s == [0.0, 1.0, 2.0]


def test_idle_share_counts_slots_without_a_token():
    assert measures.idle_share(40, 10, 8) == 0.5
    assert measures.idle_share(80, 10, 8) == 0.0


def test_saturated_rate_excludes_the_end_of_the_longest_answers():
    records = [make_record("t", 1.0, 2.0), make_record("t", 2.0, 3.0, 9.0, 10.0)]
    assert measures.saturated_rate(records) == pytest.approx(3 / 2.0 / 3)


def test_goodput_uses_the_targets_of_each_group():
    levels = {"interactive": ServiceLevel(ttft_ms=100), "batch": ServiceLevel()}
    records = [make_record("interactive", 0.05), make_record("interactive", 0.2), make_record("batch", 9.0)]
    assert measures.goodput_per_s(records, levels, 4.0) == 0.5
    assert measures.met_share(records[:2], levels["interactive"]) == 0.5


def test_prompt_counts_as_served_at_its_first_token():
    records = [make_record("t", 1.0, 3.0, prompt="long"), make_record("t", 2.0, prompt="short")]
    served = measures.served_tokens(records, {"long": 100, "short": 10})
    assert served == [(1.0, 101), (2.0, 112), (3.0, 113)]
    assert measures.served_tokens(records, {"long": 100, "short": 10}, until_s=2.5) == served[:2]


def test_thinning_keeps_the_last_point():
    points = [(float(i), i) for i in range(10)]
    assert measures.thinned(points, 3) == [points[0], points[4], points[8], points[9]]
    assert measures.thinned([], 3) == []


def test_experiment_table_is_printed_as_markdown():
    table = Table(["", "ms", "count"], [["fast", 1.234, 1234], ["none", float("nan"), None]])
    assert table.markdown() == "|  | ms | count |\n| --- | --- | --- |\n| fast | 1.23 | 1,234 |\n| none | - | - |"
    assert [cell(value) for value in (12.34, 123.4, 7)] == ["12.3", "123", "7"]


def test_counters_are_summed_over_their_labels():
    text = '# HELP a_total x\na_total{class="x"} 1.0\na_total{class="y"} 2.0\nb_total 5\ngauge 7\nh_bucket{le="1"} 3\n'
    assert parse_counters(text) == {"a_total": 3.0, "b_total": 5.0}


def test_fields_of_a_job_are_sent_in_its_own_body_only(fake_server):
    jobs = [make_job(QUESTIONS[1], "interactive", 2, priority_class="interactive"), make_job(QUESTIONS[1], "none", 2)]
    options = GenerationOptions("openai", "demo")
    http = HttpClient("127.0.0.1", fake_server.port)
    run = asyncio.run(run_load(http, options, jobs, Load(), lambda _: None))
    assert [record.task for record in run.records] == ["interactive", "none"]
    assert [body.get("priority_class") for body in fake_server.bodies] == ["interactive", None]


@pytest.fixture
def served(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    return Served(Bench("demo", 1), "variant", http, GenerationOptions("openai", "demo"))


def test_reference_answers_are_generated_once_and_expected_under_load(served, fake_server):
    fake_server.answers["Add 1 and 2."] = "3"
    fake_server.cpu_s = 7.0
    jobs = [make_job(question, "g", 5) for question in QUESTIONS]
    jobs = served.referenced(served.referenced(jobs + jobs))
    assert [body["prompt"] for body in fake_server.bodies] == [question.text for question in QUESTIONS]
    assert [job.prompt.expected for job in jobs] == ["ok", "3", "ok", "3"]
    assert served.bench.known_right == [False, True]
    fake_server.answers["Add 1 and 2."] = "4"  # another answer under load
    trial = served.run("load", jobs, [0.0] * len(jobs))
    assert [record.exact for record in trial.records] == [True, False, True, False]
    assert trial.counters == {"process_cpu_seconds_total": 1.5}  # the fake adds 0.5 at each of three further scrapes
    assert not served.bench.went_right


def test_experiment_fails_if_a_reference_request_fails(served):
    with pytest.raises(ServerError, match="the reference run failed"):
        served.referenced([make_job(Prompt("break"), "g", 5)])


def test_experiment_fails_after_a_bound_violation_or_a_restart():
    def bench(violations: int, restarts: int) -> Bench:
        totals = {
            "llm_serving:bound_violations_total": float(violations),
            "llm_serving:worker_restarts_total": float(restarts),
        }
        record = replace(make_record("t", 1.0), expected="ok", text="ok")
        return Bench("demo", 1, trials=[Trial("a", "l", [record], {}, 0.0)], server_totals={"a": totals, "b": totals})

    assert bench(0, 0).went_right
    assert bench(1, 0).num_bound_violations == 2
    assert not bench(1, 0).went_right
    assert not bench(0, 1).went_right


def test_experiment_results_are_json(served):
    class Result:
        title, load, tables = "t", "l", {"x": Table(["a"], [[1, float("nan")]])}

    served.bench.server_totals["a"] = {
        "llm_serving:bound_violations_total": 0.0,
        "llm_serving:worker_restarts_total": 0.0,
    }
    text = json.dumps(document(served.bench, Result()), allow_nan=False)
    assert json.loads(text)["tables"]["x"]["rows"] == [[1, None]]


def make_refused(predicted_s: float, *attempts: tuple[float, float | None], first_token_s: float) -> RequestRecord:
    sent = tuple(Attempt(sent_s, retry_after_s, predicted_s) for sent_s, retry_after_s in attempts)
    return replace(make_record("t", first_token_s, first_token_s + 1), attempts=sent)


def test_refusals_report_first_retries_and_predictions():
    records = [
        make_refused(0.5, (0.0, None), first_token_s=0.4),
        make_refused(3.0, (1.0, 2.0), (3.0, None), first_token_s=5.0),
        make_refused(4.0, (1.0, 2.0), (3.0, 1.0), (4.0, None), first_token_s=3.0 + 6.0),
        make_record("t", 1.0),
    ]
    assert measures.first_retry_share(records) == 0.5
    assert measures.predicted_after_admission(records) == [(0.5, 0.4), (3.0, 2.0), (4.0, 5.0)]
    assert measures.predicted_after_refusal(records) == [(3.0, 4.0), (4.0, 8.0)]


def test_worst_predictions_name_the_phase_that_took_the_time():
    def parts(**ms: float) -> dict[str, object]:
        first = {"predicted_ms": 100.0, "real_ms": sum(ms.values())}
        return {"first_token": first, "parts": [{"what": what, "ms": each} for what, each in ms.items()]}

    def first_token(first_token_s: float, **ms: float) -> measures.FirstToken:
        return measures.parse(make_refused(0.1, (1.0, None), first_token_s=1.0 + first_token_s), parts(**ms))

    inside = first_token(0.5, tokenizing=1, inbox=40, queued=350, device=10, prefill=50, decode=7000)
    assert (inside.seen_s, inside.factor) == (pytest.approx(0.5), pytest.approx(5.0))
    assert inside.spent_s == {
        "admission": pytest.approx(0.001),
        "running steps": pytest.approx(0.05),
        "queue": pytest.approx(0.35),
        "own step": pytest.approx(0.05),
    }
    outside = first_token(0.4, inbox=40, prefill=50)
    assert outside.real_s == pytest.approx(0.09)
    assert [each.cause for each in (inside, outside, first_token(0.05, prefill=50))] == [
        "queue",
        measures.OUTSIDE,
        measures.SOONER,
    ]
    assert measures.worst_predictions([outside, inside, *[first_token(0.1, prefill=100)] * 198]) == [inside, outside]


def test_prediction_error_is_relative_and_prediction_factor_is_symmetric():
    accuracy = measures.Accuracy.of([(1.0, 1.0), (1.2, 1.0), (1.0, 3.0)])
    assert (accuracy.num, accuracy.median_error, accuracy.p99_factor) == (
        3,
        pytest.approx(0.2),
        pytest.approx(3.0, rel=0.05),
    )
    assert (accuracy.p99_later, accuracy.p99_sooner) == (pytest.approx(3.0, rel=0.05), pytest.approx(1.2, rel=0.05))


def test_gaps_are_between_tokens_of_one_request():
    records = [make_record("a", 0.5, 0.75, 1.5), make_record("a", 2.0)]
    assert measures.gaps_ms(records, 9.0) == [250.0, 750.0]
    assert measures.gaps_ms(records, 0.6) == [250.0]


def test_completed_requests_are_counted_by_second():
    records = [make_record("a", end) for end in (0.1, 1.2, 1.9, 7.0)]
    assert measures.per_second(records, 3) == [1, 2, 0]


def test_inversion_table_shows_a_dash_without_short_requests():
    pytest.importorskip("matplotlib")
    from experiments import inversion

    records = [make_record("interactive", 0.5), make_record("standard", 4.0)]
    assert inversion._row(Trial("a", "l", records, {}, 0.0), 3.0, 5.0) == [0.0, "-", 0.5]
