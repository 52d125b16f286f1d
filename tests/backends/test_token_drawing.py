"""Tokens that Ascend's primitives draw equal those of the sampler."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends import create_backend
from llm_serving.backends.ascend_cells import AscendLargestLogits
from llm_serving.backends.token_drawing import LEAST_FLOAT, MAX_DRAWN_VOCAB, NUM_PARAMETERS, _Share, split_floats
from llm_serving.worker.compiled_graph import CompiledNetwork
from llm_serving.worker.sampler import LibrarySampler
from llm_serving.worker.token_graph import (
    NUM_SORTED,
    DeviceLogits,
    TokenChoice,
    TokenGraph,
    _pieces,
    choice_of,
    drawing_parameters,
)
from llm_serving_tools.mindir import write_mindir
from mindspore import nn
from mindspore.train.mind_ir_pb2 import ModelProto
from support.graph_model import backend
from support.step_factories import sampling_input

pytestmark = pytest.mark.mindspore
NO_HISTORY = np.empty(0, np.int32)
choose_tokens = LibrarySampler()
NUM_ROWS = 64


@pytest.fixture(scope="module", params=[1, 300])
def draw(request):
    """A function from logits [S, V] and their sampling parameters to the ids that the graphs draw; V as its `size`."""
    own, size = backend("cpu", "float32"), request.param
    largest = CompiledNetwork(AscendLargestLogits(), [ms.Tensor(shape=[None, size], dtype=ms.float32)])
    graph = TokenGraph(CompiledNetwork(nn.Cell()), own, size)

    def drawn(logits, sampling):
        parameters = ms.Tensor(drawing_parameters(sampling))
        computed = DeviceLogits(ms.Tensor(logits), largest.submit([logits])[1], parameters, choice_of(sampling))
        return graph.choose(computed).asnumpy()[:, 0]

    drawn.size, drawn.graph = size, graph
    return drawn


def random_logits(random, size, scale):
    """Rows of every kind: continuous numbers, few different ones, forbidden tokens, all equal."""
    logits = random.normal(0, scale, (NUM_ROWS, size)).astype(np.float32)
    logits[16:32] = logits[16:32].astype(np.float16)
    logits[24:40] = np.round(logits[24:40])
    logits[32:48, 1:][random.random((16, size - 1)) < 0.9] = -np.inf
    logits[48:56] = 0
    logits[56:, size // 2] = 40
    return logits


@pytest.mark.parametrize("scale", [0.01, 2.0, 20.0])
@pytest.mark.parametrize("choice", NUM_SORTED, ids=lambda each: each.name)
def test_drawn_tokens_are_those_of_the_sampler(draw, scale, choice):
    random = np.random.default_rng(int(scale))
    for _ in range(4):
        logits = random_logits(random, draw.size, scale)
        given = {
            "temperature": random.choice([0, 1e-30, 1e-6, 0.5, 1, 1, 2, 100], NUM_ROWS),
            "min_p": random.choice([0, 0, 1e-5, 0.05, 1], NUM_ROWS),
            "seed": random.integers(0, 2**63, NUM_ROWS),
            "position": random.integers(0, 2**31, NUM_ROWS),
        }
        given["temperature"][-1] = 1
        if choice is not TokenChoice.ALL:
            is_sorted = choice is TokenChoice.SORTED
            given["top_k"] = random.choice([0, 1, 2, 20, 40, 128, *[129, 250, 10**6] * is_sorted], NUM_ROWS)
            given["top_k"][-1] = 150 if is_sorted else 2
            top_p = random.choice([1e-30, 0.01, 0.3, 0.5, 0.8, 0.95, 0.9999999, 1], NUM_ROWS)
            given["top_p"] = np.where(is_sorted | (given["top_k"] > 0), top_p, 1)
        sampling = sampling_input(NUM_ROWS, **given)
        assert choice_of(sampling) is choice
        expected = choose_tokens(logits, sampling, NO_HISTORY).token_ids
        assert (draw(logits, sampling) == expected).all()


def test_rows_whose_logits_are_not_finite_leave_the_others_unchanged(draw):
    logits = random_logits(np.random.default_rng(5), draw.size, 3.0)
    logits[3, 0], logits[9, -1], logits[15] = np.nan, np.inf, -np.inf
    sampling = sampling_input(NUM_ROWS, temperature=1, seed=np.arange(NUM_ROWS), top_k=3)
    chosen = choose_tokens(logits, sampling, NO_HISTORY)
    valid = chosen.token_ids >= 0
    ids = draw(logits, sampling)
    assert valid.sum() == NUM_ROWS - 3
    assert (ids[valid] == chosen.token_ids[valid]).all()
    assert ((ids >= 0) & (ids < draw.size)).all(), "the next step reads an embedding that does not exist"


def test_shares_of_a_total_are_exact():
    backend("cpu", "float32")
    random = np.random.default_rng(3)
    numbers = [0, 1, 2**52, 2**53 - 1, 2**53, *(random.integers(0, 2**53, 500).tolist())]
    totals = [2**51, 2**33, 2**51 - 1, 2**51, 2**51, *(2 ** random.uniform(33, 51, 500)).astype(np.int64).tolist()]
    inputs = [ms.Tensor(shape=[None, 4], dtype=ms.float32), ms.Tensor(shape=[None, 1], dtype=ms.int64)]
    pieces = np.column_stack(_pieces(np.array(numbers) * 2.0**-53)).astype(np.float32)
    shares = CompiledNetwork(_Share(), inputs).submit((pieces, np.array(totals).reshape(-1, 1)))
    whole, rest, step = (each.asnumpy()[:, 0].tolist() for each in shares)
    products = [number * total for number, total in zip(numbers, totals, strict=True)]
    assert whole == [product >> 53 for product in products]
    assert rest == [product % 2**53 for product in products]
    assert step == [1 << (product >> 53).bit_length() >> 1 for product in products]


def test_device_that_draws_other_tokens_leaves_drawing_to_the_host(draw, monkeypatch, caplog):
    def other_tokens(logits, sampling, history):
        chosen = choose_tokens(logits, sampling, history)
        return replace(chosen, token_ids=chosen.token_ids ^ 1)

    monkeypatch.setattr(draw.graph, "_drawing", dict(draw.graph._drawing))
    draw.graph.check_drawing(choose_tokens)
    assert not caplog.records
    sampling = sampling_input(1, temperature=1)
    logits = np.zeros((1, draw.size), np.float32)
    assert draw(logits, sampling) is not None
    draw.graph.check_drawing(other_tokens)
    assert "the host chooses" in caplog.text
    assert draw.graph.choose(DeviceLogits(ms.Tensor(logits), choice=choice_of(sampling))) is None


def test_numbers_are_split_exactly():
    random = np.random.default_rng(0)
    largest = np.finfo(np.float32).max
    numbers = np.array([0, LEAST_FLOAT, 1e-9, 0.1, 1, largest, *np.exp(random.uniform(-70, 88, 200))], np.float32)
    digits, powers = split_floats(numbers)
    assert digits.max() < 2**24
    assert (np.ldexp(digits.astype(np.float64), powers - 126).astype(np.float32) == numbers).all()


def test_exported_drawing_graph_has_device_operators_and_draws_the_same_tokens(tmp_path):
    own, size = backend("cpu", "float32"), 300
    types = {size: ms.float32, 2: ms.float32, NUM_PARAMETERS: ms.int32}
    inputs = [ms.Tensor(shape=[None, width], dtype=dtype) for width, dtype in types.items()]
    of_ascend = create_backend("ascend", "float16").token_drawing(size, MAX_DRAWN_VOCAB)
    write_mindir(of_ascend, tmp_path / "ascend.mindir", inputs)
    written = ModelProto()
    written.ParseFromString((tmp_path / "ascend.mindir").read_bytes())
    operators = {node.op_type for node in written.graph.node}
    assert {"CumsumExt", "TopkExt", "GatherD"} <= {
        name.split(":")[2] if name.startswith("REF") else name for name in operators
    }
    write_mindir(own.token_drawing(size, MAX_DRAWN_VOCAB), tmp_path / "cpu.mindir", inputs)
    read = nn.GraphCell(ms.load(str(tmp_path / "cpu.mindir")))
    logits = random_logits(np.random.default_rng(1), size, 2.0)
    sampling = sampling_input(NUM_ROWS, temperature=1, top_p=0.9, seed=np.arange(NUM_ROWS))
    largest = np.column_stack([logits.argmax(1), logits.max(1)]).astype(np.float32)
    ids, _ = read(*map(ms.Tensor, (logits, largest, drawing_parameters(sampling))))
    assert (ids.asnumpy() == choose_tokens(logits, sampling, NO_HISTORY).token_ids).all()
