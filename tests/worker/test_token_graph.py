"""The graph of steps whose rows have one token: greedy tokens come from the device, as the sampler chooses them."""

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends.ascend_cells import AscendLargestLogits
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.sampler import LibrarySampler, greedy_samples, uses_logits_unchanged
from llm_serving.worker.token_graph import StartedStep, TokenChoice, TokenGraph, choice_of, tokens_of
from msgspec.structs import replace
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
    chosen = LibrarySampler()(logits, sampling_input(9), NO_HISTORY)
    on_device, copied = largest(logits)
    assert on_device.dtype == np.int32
    assert (on_device == chosen.token_ids).all()
    assert (tokens_of(copied) == chosen.token_ids).all()


@pytest.mark.parametrize("number", [np.inf, np.nan, -np.inf])
def test_device_logits_have_no_most_likely_token_if_the_largest_is_not_finite(largest, number):
    logits = np.zeros((2, 32), np.float32)
    logits[1] = number
    assert tokens_of(largest(logits)[1]) is None


def test_greedy_samples_are_those_whose_parameters_select_the_likeliest_token():
    assert greedy_samples(sampling_input(3, temperature=[0, 1, 1], top_k=[3, 1, 2])).tolist() == [True, True, False]
    assert greedy_samples(sampling_input(1, top_p=0.5, min_p=0.1, history={0: [1, 2]})).all()


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"min_p": 0.1}, "ALL"),
        ({"top_k": 128, "top_p": 0.9}, "LARGEST"),
        ({"top_k": [0, 3]}, "LARGEST"),
        ({"top_k": 129}, "SORTED"),
        ({"top_p": 0.9}, "SORTED"),
        ({"top_k": 5, "typical_p": 0.9}, "HOST"),
    ],
    ids=str,
)
def test_sampling_parameters_select_how_tokens_are_chosen(given, choice):
    assert choice_of(sampling_input(2, temperature=[0, 1], **given)) is TokenChoice[choice]
    assert choice_of(sampling_input(2, temperature=0, **given)) is TokenChoice.GREEDY


def test_host_samples_at_temperatures_whose_scale_has_no_digits():
    assert choice_of(sampling_input(1, temperature=1e30)) is TokenChoice.ALL
    assert choice_of(sampling_input(1, temperature=1e32)) is TokenChoice.HOST


@pytest.mark.parametrize(
    "given",
    [
        {"num_logprobs": [-1, 0]},
        {"repetition_penalty": [1, 1.1]},
        {"presence_penalty": [0, 0.1]},
        {"frequency_penalty": [0.1, 0]},
        {"bias": {1: {3: 1.0}}},
        {"allowed": {0: [3]}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_samples_that_change_or_report_logits_are_recognized(given):
    assert uses_logits_unchanged(sampling_input(2, temperature=[0, 0.1], top_k=3))
    assert not uses_logits_unchanged(sampling_input(2, **given))


DRAWN = {"temperature": 1.0, "seed": [7, 8, 9], "top_k": [0, 4, 40], "top_p": [1, 1, 0.9]}


@pytest.mark.parametrize("attention_rows", [0, 8])
def test_tokens_of_the_device_are_those_of_the_sampler(tmp_path, monkeypatch, attention_rows):
    """Every second step is greedy, the others are drawn."""
    write_model(tmp_path, SPEC)
    own = backend("cpu", "bfloat16")
    monkeypatch.setattr(own, "attention_rows", attention_rows)
    at_once = []

    def submit(graph, inputs, given_ids=None, sampling=None):
        at_once.append(given_ids is not None)
        return compute(graph, inputs, given_ids, sampling)

    compute, choose = TokenGraph.submit, TokenGraph.choose
    monkeypatch.setattr(TokenGraph, "submit", submit)

    def tokens(on_device, ahead, as_program=False):
        """Compute a prompt of each of two requests and decode them, in another order of rows in each step."""
        runner = ModelRunner(SPEC, tmp_path, own, 8, 16, 32, as_program=as_program)
        monkeypatch.setattr(TokenGraph, "choose", choose if on_device else lambda *given: None)
        steps = [
            step_input([([3, 5, 7], 0, [1]), ([4], 0, [2])], 0),
            step_input([([-1], 3, [1]), ([-2], 1, [2])], 1),
            step_input([([-2], 2, [2]), ([-1], 4, [1])], 2),
            step_input([([-2], 5, [1]), ([9], 0, [3]), ([-1], 3, [2])], 3),
            step_input([([-2], 1, [3]), ([-3], 4, [2]), ([-1], 6, [1])], 4),
        ]
        for index, step in enumerate(steps):
            count = step.sampling.num_samples
            drawn = DRAWN if index % 2 else {}
            given = {name: value[:count] if isinstance(value, list) else value for name, value in drawn.items()}
            steps[index] = replace(step, sampling=sampling_input(count, position=index, **given))
        if ahead:
            started = [runner.start(step) for step in steps]
            outputs = [each.output() for each in started]
        else:
            outputs = [runner.execute(step) for step in steps]
        return [output.token_ids.tolist() for output in outputs]

    expected = tokens(on_device=False, ahead=False, as_program=True)  # the same bits, compiled sooner
    assert tokens(on_device=False, ahead=True) == expected
    assert not any(at_once), "a step refers on the device to tokens that the host sampled"
    assert tokens(on_device=True, ahead=True) == expected
    assert sum(at_once) == (4 if attention_rows else 3)


def test_a_row_without_a_token_ends_and_the_next_step_computes_the_other_rows(tmp_path, monkeypatch):
    write_model(tmp_path, SPEC)
    runner = ModelRunner(SPEC, tmp_path, backend("cpu", "bfloat16"), 8, 16, 32, as_program=False)
    runner.execute(step_input([([3], 0, [1]), ([4], 0, [2])], 0))
    computed = runner._computed

    def without_a_number(*arguments):
        found = computed(*arguments)
        logits, largest = found.logits.asnumpy().copy(), found.largest.asnumpy().copy()
        logits[0], largest[0] = np.nan, np.nan
        return found._replace(logits=ms.Tensor(logits), largest=ms.Tensor(largest))

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_computed", without_a_number)
        broken = runner.start(step_input([([-1], 1, [1]), ([-2], 1, [2])], 1))
    following = runner.start(step_input([([-1], 2, [1]), ([-2], 2, [2])], 2))
    assert isinstance(broken, StartedStep) and isinstance(following, StartedStep)
    assert list(broken.output().row_errors) == [0]
    assert broken.output().token_ids[0] == -1
    assert following.output().row_errors == {}
