"""Prompt logprobs and vectors of the runner, compared with logits computed by the test."""

from operator import attrgetter

import numpy as np
import pytest
from llm_serving.errors import WorkerError
from llm_serving.worker import sampling_reference, scoring
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.scoring import check_scoring, score
from support.graph_model import GraphModel, backend
from support.model_factories import random_weights, tiny_spec, write_model
from support.reference_llama import reference_logits, reference_states
from support.step_factories import scoring_input, step_input

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
PROMPT = np.random.default_rng(7).integers(0, 97, 21).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return GraphModel(SPEC, folder, backend("cpu", "bfloat16"))


@pytest.fixture
def runner(folder):
    return ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), num_blocks=16, block_size=16, max_model_len=64)


def scores_of_prompt(start=0, end=20, count=2, row=0):
    """Return the logprob of each token of `PROMPT` after those in [start, end), in a row that starts at `start`."""
    return [(row, token - start, [PROMPT[token + 1]], count) for token in range(start, end)]


def expected(logits, token_id):
    """Return logprob and rank in float64."""
    logits = logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    return logprobs[token_id], 1 + int((logits > logits[token_id]).sum())


def test_scores_of_a_prompt_follow_from_its_logits(runner, model):
    logits = model.logits((PROMPT, 0, [1, 2]))
    output = runner.execute(step_input([(PROMPT, 0, [8, 1])], samples=[], scores=scores_of_prompt(count=3)))
    scores = output.scores
    assert scores.top.offsets.tolist() == [3 * index for index in range(len(PROMPT))]
    for index, token_id in enumerate(PROMPT[1:]):
        logprob, rank = expected(logits[index], token_id)
        assert scores.logprobs[index] == pytest.approx(logprob, abs=1e-5)
        assert scores.ranks[index] == rank
        best = np.argsort(-logits[index], kind="stable")[:3]
        assert scores.top.token_ids[3 * index : 3 * index + 3].tolist() == best.tolist()
        assert scores.top.logprobs[3 * index] == pytest.approx(expected(logits[index], best[0])[0], abs=1e-5)


def test_results_of_several_kinds_come_from_one_step(runner, folder, model):
    rows = [(PROMPT, 0, [8, 1]), (PROMPT[:5], 0, [2]), (PROMPT[:9], 0, [3])]
    step = step_input(rows, samples=[1], scores=[(0, 4, [7, 9], 0), (0, 6, [], 5), (1, 2, [1], 1)], vectors=[(2, 8)])
    output = runner.execute(step)
    states = model.states((PROMPT, 0, [1, 2]))
    logits = model.head(states)
    assert output.token_ids.tolist() == [int(logits[4].argmax())]
    assert output.scores.logprobs.tolist() == pytest.approx(
        [expected(logits[at], token_id)[0] for at, token_id in ((4, 7), (4, 9), (2, 1))], abs=1e-5
    )
    assert output.scores.top.offsets.tolist() == [0, 0, 5, 6]
    assert output.vectors.tobytes() == states[8:9].tobytes()
    assert output.row_errors == {}


def test_vectors_and_log_probabilities_are_those_of_the_reference(folder):
    runner = ModelRunner(SPEC, folder, backend("cpu", "float32"), num_blocks=16, block_size=16, max_model_len=64)
    step = step_input([(PROMPT, 0, [8, 1])], samples=[], scores=scores_of_prompt(count=0), vectors=[(0, 20)])
    output = runner.execute(step)
    weights = random_weights(SPEC)
    np.testing.assert_allclose(output.vectors[0], reference_states(SPEC, weights, PROMPT)[-1], atol=2e-5)
    logits = reference_logits(SPEC, weights, PROMPT)
    expected_logprobs = [expected(logits[index], token_id)[0] for index, token_id in enumerate(PROMPT[1:])]
    np.testing.assert_allclose(output.scores.logprobs, expected_logprobs, atol=2e-5)
    assert output.vectors.dtype == output.scores.logprobs.dtype == np.float32


def test_scores_are_bit_identical_in_any_chunk_and_batch(runner, folder):
    whole = runner.execute(step_input([(PROMPT, 0, [8, 1])], scores=scores_of_prompt()))
    chunked = ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), num_blocks=16, block_size=16, max_model_len=64)
    parts = []
    for step, (start, end) in enumerate([(0, 6), (6, 7), (7, 21)]):
        rows = [([5, 6], 2 * step, [3]), (PROMPT[start:end], start, [8, 1])]
        scores = scores_of_prompt(start, min(end, 20), row=1)
        parts.append(chunked.execute(step_input(rows, step=step, samples=[0, 1] if end == 21 else [0], scores=scores)))
    for name in ("logprobs", "ranks", "top.token_ids", "top.logprobs"):
        of = attrgetter(f"scores.{name}")
        assert np.concatenate([of(part) for part in parts]).tobytes() == of(whole).tobytes(), name
    assert parts[-1].token_ids[1] == whole.token_ids[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scores_are_bit_identical_to_the_whole_network(folder, dtype):
    model = GraphModel(SPEC, folder, backend("cpu", dtype))
    logits = model.logits((PROMPT, 0, [1, 2]))
    states = model.states((PROMPT, 0, [1, 2]))
    assert states.dtype == np.float32
    pieces = [model.head(states[start : start + 5]) for start in range(0, len(states), 5)]
    assert np.concatenate(pieces).tobytes() == logits.tobytes()


def test_scoring_computes_a_bounded_number_of_logits_at_a_time(monkeypatch):
    rng = np.random.default_rng(3)
    table = rng.normal(size=(50, 8)).astype(np.float32)
    states = rng.normal(size=(23, 8)).astype(np.float32)
    results = scoring_input(*(([int(rng.integers(50))] * int(rng.integers(3)), int(rng.integers(4))) for _ in states))
    counts = []

    def head(rows):
        counts.append(len(rows))
        return np.array([table @ row for row in rows])  # one row at a time: no sum depends on other rows

    def scored():
        return score(states, results, head, 50, sampling_reference.choose_tokens)

    whole = scored()
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 50 * 7)
    pieces = scored()
    assert counts == [23, 7, 7, 7, 2]
    for name in ("logprobs", "ranks", "top.offsets", "top.token_ids", "top.logprobs"):
        of = attrgetter(f"scores.{name}")
        assert of(pieces).tobytes() == of(whole).tobytes(), name


def test_ranks_count_ties_with_a_lower_id():
    logits = np.array([[1, 3, 3, 0, 3]], np.float32)
    results = scoring_input(([0, 1, 2, 3, 4], 9))
    scores, errors = score(np.zeros((1, 2), np.float32), results, lambda _: logits, 5, sampling_reference.choose_tokens)
    assert scores.ranks.tolist() == [4, 1, 2, 5, 3]
    assert scores.top.token_ids.tolist() == [1, 2, 4, 0, 3]  # there are only five tokens
    assert scores.logprobs[[1, 2, 4, 0, 3]].tobytes() == scores.top.logprobs.tobytes()
    assert not errors


def test_nan_logits_only_fail_their_result():
    logits = np.array([[1, 2], [np.nan, 1], [2, 1]], np.float32)
    results = scoring_input(([0], 1), ([0], 1), ([0], 1))
    scores, errors = score(np.zeros((3, 2), np.float32), results, lambda _: logits, 2, sampling_reference.choose_tokens)
    assert list(errors) == [1]
    assert "log-probabilities cannot be computed: the largest logit is nan" in errors[1]
    assert np.isfinite(scores.logprobs[[0, 2]]).all()


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (scoring_input(([97], 0)), "token_ids of scoring must be from 0 to 96"),
        (scoring_input(([-1], 0)), "token_ids of scoring must be from 0 to 96"),
        (scoring_input(([3], -1)), "num_logprobs of scoring must be at least 0. Given: -1"),
    ],
)
def test_out_of_range_scoring_arrays_are_rejected(results, message):
    with pytest.raises(WorkerError, match=message):
        check_scoring(results, 97)
