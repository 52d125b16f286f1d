"""The graph of steps whose rows have one token: greedy tokens come from the device, as the sampler chooses them."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends.ascend_cells import AscendLargestLogits
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.sampler import choose_tokens, is_greedy
from llm_serving.worker.started_step import StartedStep
from llm_serving.worker.token_graph import TokenGraph, most_likely
from support.graph_model import backend
from support.model_factories import tiny_spec, write_model
from support.step_factories import sampling_input, step_input

pytestmark = pytest.mark.mindspore
SPEC = tiny_spec()
NO_HISTORY = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def largest():
    """Return a function from logits to the two results of `AscendLargestLogits`."""
    backend("cpu", "float32")
    inputs = [ms.Tensor(shape=[None, None], dtype=ms.float32)]
    network = CompiledNetwork(AscendLargestLogits(), inputs)
    return lambda logits: [each.asnumpy() for each in network.submit([logits])]


@pytest.mark.parametrize("size", [1, 17, 32_000, 300_001])
def test_device_logits_break_ties_by_the_lowest_id(largest, size):
    logits = np.random.default_rng(size).integers(-3, 3, (9, size)).astype(np.float32)
    logits[0] = 0
    logits[1, -1] = 7
    logits[2, size // 2 :] = 1e38
    chosen = choose_tokens(logits, sampling_input(9), NO_HISTORY)
    on_device, copied = largest(logits)
    assert on_device.dtype == np.int32
    assert (on_device == chosen.token_ids).all()
    assert (most_likely(copied) == chosen.token_ids).all()


@pytest.mark.parametrize("number", [np.inf, np.nan, -np.inf])
def test_device_logits_have_no_most_likely_token_if_the_largest_is_not_finite(largest, number):
    logits = np.zeros((2, 32), np.float32)
    logits[1] = number
    assert most_likely(largest(logits)[1]) is None


def test_is_greedy_recognizes_parameters_that_select_the_likeliest_token():
    assert is_greedy(sampling_input(2))
    assert is_greedy(sampling_input(2, temperature=[0, 1], top_k=[3, 1]))
    assert is_greedy(sampling_input(2, top_p=0.5, min_p=0.1, history={0: [1, 2]}))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": [0, 0.1]},
        {"num_logprobs": [-1, 0]},
        {"repetition_penalty": [1, 1.1]},
        {"presence_penalty": [0, 0.1]},
        {"frequency_penalty": [0.1, 0]},
        {"bias": {1: {3: 1.0}}},
        {"allowed": {0: [3]}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_samples_that_need_logits_are_not_greedy(given):
    assert not is_greedy(sampling_input(2, **given))


@pytest.mark.parametrize("attention_rows", [0, 8])
def test_greedy_tokens_are_those_of_the_sampler(tmp_path, monkeypatch, attention_rows):
    write_model(tmp_path, SPEC)
    own = backend("cpu", "bfloat16")
    monkeypatch.setattr(own, "attention_rows", attention_rows)
    at_once = []

    def submit(graph, inputs, given_ids=None):
        at_once.append(given_ids is not None)
        return compute(graph, inputs, given_ids)

    compute = TokenGraph.submit
    monkeypatch.setattr(TokenGraph, "submit", submit)

    def tokens(greedy, ahead):
        """Compute a prompt of each of two requests and decode them, in another order of rows in each step."""
        runner = ModelRunner(SPEC, tmp_path, own, 8, 16, 32, as_program=False)
        copied = []
        if not greedy:
            monkeypatch.setattr("llm_serving.worker.model_runner.is_greedy", lambda sampling: copied.append(1))
        steps = [
            step_input([([3, 5, 7], 0, [1]), ([4], 0, [2])], 0),
            step_input([([-1], 3, [1]), ([-2], 1, [2])], 1),
            step_input([([-2], 2, [2]), ([-1], 4, [1])], 2),
            step_input([([-2], 5, [1]), ([9], 0, [3]), ([-1], 3, [2])], 3),
            step_input([([-2], 1, [3]), ([-3], 4, [2]), ([-1], 6, [1])], 4),
        ]
        if ahead:
            started = [runner.start(step) for step in steps]
            outputs = [each.output() for each in started]
        else:
            outputs = [runner.execute(step) for step in steps]
        assert bool(copied) != greedy
        return [output.token_ids.tolist() for output in outputs]

    expected = tokens(greedy=True, ahead=False)
    assert tokens(greedy=True, ahead=True) == expected
    assert sum(at_once) == 2 * (4 if attention_rows else 3)
    assert tokens(greedy=False, ahead=False) == expected
    assert tokens(greedy=False, ahead=True) == expected


def test_a_step_whose_previous_step_is_drawn_waits_for_its_tokens(tmp_path):
    write_model(tmp_path, SPEC)
    own = backend("cpu", "bfloat16")

    def run(ahead):
        runner = ModelRunner(SPEC, tmp_path, own, 8, 16, 32, as_program=False)
        drawn = sampling_input(1, temperature=1.0, seed=5)
        steps = [
            replace(step_input([([3], 0, [1])], 0), sampling=drawn),
            replace(step_input([([-1], 1, [1])], 1), sampling=drawn),
            step_input([([-1], 2, [1])], 2),
        ]
        call = runner.start if ahead else runner.execute
        outputs = [call(step) for step in steps]
        return [(each.output() if ahead else each).token_ids.tolist() for each in outputs]

    assert run(ahead=True) == run(ahead=False)


def test_a_row_without_a_token_ends_and_the_next_step_computes_the_other_rows(tmp_path, monkeypatch):
    write_model(tmp_path, SPEC)
    runner = ModelRunner(SPEC, tmp_path, backend("cpu", "bfloat16"), 8, 16, 32, as_program=False)
    runner.execute(step_input([([3], 0, [1]), ([4], 0, [2])], 0))
    computed = runner._computed

    def without_a_number(*arguments):
        found = computed(*arguments)
        logits, largest = found.logits.asnumpy().copy(), found.largest.asnumpy().copy()
        logits[0], largest[0] = np.nan, np.nan
        found.logits, found.largest = ms.Tensor(logits), ms.Tensor(largest)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_computed", without_a_number)
        broken = runner.start(step_input([([-1], 1, [1]), ([-2], 1, [2])], 1))
    following = runner.start(step_input([([-1], 2, [1]), ([-2], 2, [2])], 2))
    assert isinstance(broken, StartedStep) and isinstance(following, StartedStep)
    assert list(broken.output().row_errors) == [0]
    assert broken.output().token_ids[0] == -1
    assert following.output().row_errors == {}
