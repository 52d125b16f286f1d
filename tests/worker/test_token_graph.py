"""The graph of steps whose rows have one token: greedy tokens come from the device, as the sampler chooses them."""

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends.ascend_cells import AscendLargestLogits
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.sampler import choose_tokens, is_greedy
from llm_serving.worker.token_graph import DeviceLogits
from support.graph_model import backend
from support.model_factories import tiny_spec, write_model
from support.step_factories import sampling_input, step_input

pytestmark = pytest.mark.mindspore
SPEC = tiny_spec()
NO_HISTORY = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def largest():
    """Return a function from logits to `DeviceLogits`."""
    backend("cpu", "float32")
    inputs = [ms.Tensor(shape=[None, None], dtype=ms.float32)]
    network = CompiledNetwork(AscendLargestLogits(), inputs)
    return lambda logits: DeviceLogits(ms.Tensor(logits), network.submit([logits]))


@pytest.mark.parametrize("size", [1, 17, 32_000, 300_001])
def test_device_logits_break_ties_by_the_lowest_id(largest, size):
    logits = np.random.default_rng(size).integers(-3, 3, (9, size)).astype(np.float32)
    logits[0] = 0
    logits[1, -1] = 7
    logits[2, size // 2 :] = 1e38
    chosen = choose_tokens(logits, sampling_input(9), NO_HISTORY)
    assert (largest(logits).most_likely() == chosen.token_ids).all()


@pytest.mark.parametrize("number", [np.inf, np.nan, -np.inf])
def test_device_logits_have_no_most_likely_token_if_the_largest_is_not_finite(largest, number):
    logits = np.zeros((2, 32), np.float32)
    logits[1] = number
    assert largest(logits).most_likely() is None


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

    def tokens(greedy):
        runner = ModelRunner(SPEC, tmp_path, own, 8, 16, 32, as_program=False)
        copied = []
        if not greedy:
            monkeypatch.setattr("llm_serving.worker.model_runner.is_greedy", lambda sampling: copied.append(1))
        prompt = runner.execute(step_input([([3, 5, 7], 0, [1]), ([4], 0, [2])], 0))
        decode = runner.execute(step_input([([-1], 3, [1]), ([-2], 1, [2])], 1))
        assert bool(copied) != greedy
        return prompt.token_ids.tolist(), decode.token_ids.tolist()

    assert tokens(greedy=True) == tokens(greedy=False)
