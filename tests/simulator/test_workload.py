import random
import statistics
from pathlib import Path

import pytest
from llm_serving.errors import ConfigError
from llm_serving_simulator.workload import read_workload, repetitive_answer

WORKLOAD = """\
seed: 3
duration_s: 100
streams:
  chat:
    rate: 5
    prompt_tokens: {low: 20, high: 40}
    answer_tokens: {median: 50, p99: 200}
    max_tokens: 300
    class: interactive
    tenants: {alice: 3, bob: 1}
    prefix_tokens: 16
    prefixes: 2
  nightly:
    concurrency: 4
    requests: 30
    prompt_tokens: 100
    answer_tokens: {values: {10: 1, 200: 1}}
    priority: 1
    timeout_s: 60
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def load(tmp_path):
    return read_workload(write(tmp_path / "load.yaml", WORKLOAD))


def test_workload_has_the_rates_lengths_and_tenants_of_the_file(load):
    chat, nightly = load.streams
    assert 420 < len(chat.requests) < 580
    assert all(20 <= len(each.prompt_token_ids) <= 40 for each in chat.requests)
    assert statistics.median(each.num_output_tokens for each in chat.requests) == pytest.approx(50, rel=0.15)
    assert 0.65 < statistics.mean(each.tenant == "alice" for each in chat.requests) < 0.85
    assert {each.class_name for each in chat.requests} == {"interactive"}
    assert (nightly.concurrency, len(nightly.requests)) == (4, 30)
    assert {each.num_output_tokens for each in nightly.requests} == {10, 200}
    assert (nightly.requests[0].priority, nightly.requests[0].timeout_s) == (1, 60)


def test_workload_prompts_share_prefixes(load):
    assert len({tuple(each.prompt_token_ids[:16]) for each in load.streams[0].requests}) == 2


@pytest.mark.parametrize(("share", "run"), [(0.25, 8), (0.6, 32), (0.97, 32), (1.0, 1)])
def test_workload_answers_repeat_earlier_text(share, run):
    prompt, vocab_size = list(range(3, 203)), 2**20
    text = repetitive_answer(random.Random(1), prompt, 20_000, share, run, vocab_size)
    known, num_repeated = set(prompt), 0
    for token_id in text:
        num_repeated += token_id in known
        known.add(token_id)
    assert num_repeated / len(text) == pytest.approx(share, abs=0.04)


def test_workload_without_repetition_is_unchanged(tmp_path, load):
    changed = WORKLOAD.replace("    prefixes: 2\n", "    prefixes: 2\n    recited: 0.5\n    recited_run: 16\n")
    recited = read_workload(write(tmp_path / "load.yaml", changed))
    assert recited.streams[1] == load.streams[1]
    assert not load.has_answer_texts
    for each in recited.streams[0].requests:
        assert len(each.answer_token_ids) == min(each.num_output_tokens, each.max_tokens)


def test_workload_depends_on_the_seed(tmp_path, load):
    path = tmp_path / "load.yaml"
    assert read_workload(path) == load
    assert read_workload(path, seed=4) != load


def test_scaled_workload_has_scaled_arrival_times(load):
    faster = load.faster(2.0)
    assert faster.streams[0].requests[-1].due_s == load.streams[0].requests[-1].due_s / 2
    assert faster.streams[1] == load.streams[1]


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("rate: 5", "rate: -5", r"load.yaml:5: `streams.chat.rate` must be requests a second > 0. Given: -5"),
        ("rate: 5", "rates: 5", "must have either `rate` or `concurrency`"),
        ("  prefixes: 2", "  prefix: 2", r"load.yaml:12: unknown key `streams.chat.prefix`; the nearest known one"),
        ("{low: 20, high: 40}", "{low: 40, high: 20}", r"load.yaml:6: `streams.chat.prompt_tokens` must be an integer"),
        ("requests: 30", "rate: 3", "must have either"),
        ("    requests: 30\n", "", "must have `requests`"),
        ("seed: 3", "sed: 3", r"load.yaml:1: unknown key `sed`; the nearest known one is `seed`"),
        ("duration_s: 100\n", "", "must have `requests`, `ends_s`, or `duration_s`"),
    ],
)
def test_invalid_workload_error_has_a_line(tmp_path, before, after, error):
    assert before in WORKLOAD
    with pytest.raises(ConfigError, match=error):
        read_workload(write(tmp_path / "load.yaml", WORKLOAD.replace(before, after, 1)))


def test_median_and_p99_may_have_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    lengths = "prompt_tokens: {median: 1e2, p99: 1e2}, answer_tokens: {median: 1.0e1, p99: 1e1}"
    path.write_text(f"streams: {{a: {{rate: 1, requests: 3, {lengths}}}}}\n")
    (stream,) = read_workload(path).streams
    assert {(len(each.prompt_token_ids), each.num_output_tokens) for each in stream.requests} == {(100, 10)}
