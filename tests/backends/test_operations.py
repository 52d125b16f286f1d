from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from llm_serving.backends import Backend, create_backend
from llm_serving.backends.base import AttentionShape
from llm_serving.kernels import library
from llm_serving.network.caches import CacheShape
from mindspore import nn, ops
from support.kernel_calls import FIXED_POINT_ISA, ROUNDING_UNIT, fixed_point_bound, typed
from support.kernels import reference

pytestmark = pytest.mark.mindspore

BACKENDS = [
    ("cpu", "float32"),
    ("cpu", "bfloat16"),
    ("cpu", "float16"),
    *(pytest.param(("plain", dtype), marks=pytest.mark.plain) for dtype in ("float32", "bfloat16", "float16")),
]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
TOKENS = (1, 7, 40)


@pytest.fixture(params=BACKENDS, ids="-".join)
def backend(request: pytest.FixtureRequest) -> Backend:
    ms.set_context(mode=ms.GRAPH_MODE)
    return create_backend(*request.param)


def values(backend: Backend, seed: int, *shape: int) -> np.ndarray:
    """Return random float32 values that the model dtype represents exactly."""
    return typed(np.random.default_rng(seed).standard_normal(shape), backend.dtype).values.astype(np.float32)


def tensor(backend: Backend, array: Any) -> ms.Tensor:
    return ms.Tensor(np.asarray(array, dtype=np.float32)).astype(backend.activation_dtype)


def integers(array: Any) -> ms.Tensor:
    return ms.Tensor(np.asarray(array, dtype=np.int32))


def any_rows(example: ms.Tensor) -> ms.Tensor:
    last = [None] * (example.ndim - 1) if example.dtype == ms.int32 else list(example.shape[1:])
    return ms.Tensor(shape=[None, *last], dtype=example.dtype)


class Graph:
    """A function of tensors, compiled once for any number of rows."""

    def __init__(self, function: Callable[..., Any]) -> None:
        class Network(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.function = function

            def construct(self, *inputs: Any) -> Any:
                return self.function(*inputs)

        self.network = Network()

    def __call__(self, *inputs: ms.Tensor) -> list[np.ndarray]:
        if not self.network.compile_cache:
            self.network.set_inputs(*map(any_rows, inputs))
        outputs = self.network(*inputs)
        assert len(self.network.compile_cache) == 1
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [output.astype(ms.float32).asnumpy() for output in outputs]


class Bound(nn.Cell):
    """An operation whose last arguments are Parameters of the Cell, as in a network."""

    def __init__(self, operation: nn.Cell, *parameters: ms.Parameter) -> None:
        super().__init__()
        self.operation = operation
        self.parameters = ms.ParameterTuple(parameters)

    def construct(self, x: ms.Tensor) -> Any:
        return self.operation(x, self.parameters[0])


def assert_near(backend: Backend, result: np.ndarray, expected: np.ndarray, magnitude: float = 1.0) -> None:
    """Check with a loose bound, which detects wrong operands; tests of the kernels bound their rounding tightly."""
    unit = ROUNDING_UNIT[backend.dtype]
    assert result.shape == expected.shape
    assert np.all(np.abs(result - expected) <= 4 * unit * (np.abs(expected) + magnitude) + 1e-5)


@pytest.mark.parametrize("stored", ["table", "linear_weight"])
def test_embedding_equals_the_reference(backend: Backend, stored: str) -> None:
    table = values(backend, 1, 50, 40)
    graph = Graph(Bound(backend.embedding(), getattr(backend, stored)(table)))
    for count in TOKENS:
        token_ids = np.random.default_rng(count).integers(0, 50, count)
        rows = table[token_ids]
        # A weight may be rounded to multiples of 2^-14 of the power of two at the largest element of its row.
        half_units = 2.0**-15 * np.abs(rows).max(axis=1, keepdims=True) if stored == "linear_weight" else 0
        assert np.all(np.abs(graph(integers(token_ids))[0] - rows) <= half_units)


def test_rms_norm_equals_the_reference(backend: Backend) -> None:
    gamma = values(backend, 2, 40)
    graph = Graph(Bound(backend.rms_norm(1e-5), backend.vector(gamma)))
    for count in TOKENS:
        x = values(backend, 1, count, 40)
        assert_near(backend, graph(tensor(backend, x))[0], reference.rms_norm(x, gamma, 1e-5))


class BoundNorm(nn.Cell):
    def __init__(self, backend: Backend, gamma: np.ndarray) -> None:
        super().__init__()
        self.norm = backend.add_rms_norm(1e-5)
        self.gamma = backend.vector(gamma)

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> Any:
        return self.norm(x, y, self.gamma)


def test_add_rms_norm_equals_the_reference(backend: Backend) -> None:
    gamma = values(backend, 2, 40)
    graph = Graph(BoundNorm(backend, gamma))
    for count in TOKENS:
        x, y = values(backend, 1, count, 40), values(backend, 3, count, 40)
        normed, total = graph(tensor(backend, x), tensor(backend, y))
        assert_near(backend, total, x + y)
        assert_near(backend, normed, reference.rms_norm(total, gamma, 1e-5))


@pytest.mark.parametrize("operation", ["linear", "logits"])
def test_linear_and_logits_equal_the_reference(backend: Backend, operation: str) -> None:
    weight = values(backend, 1, 50, 48)
    graph = Graph(Bound(getattr(backend, operation)(), backend.linear_weight(weight)))
    for count in TOKENS:
        x = values(backend, 2, count, 48)
        assert_near(backend, graph(tensor(backend, x))[0], reference.linear(x, weight))


def test_logits_are_float32_sums(backend: Backend) -> None:
    weight, x = values(backend, 1, 50, 48), values(backend, 2, 3, 48)
    y = Bound(backend.logits(), backend.linear_weight(weight))(tensor(backend, x))
    assert y.dtype == ms.float32
    expected = reference.linear(x, weight)
    limit = 1e-5 + 1e-5 * np.abs(expected)
    if (backend.name, backend.dtype, library.load().llm_isa()) == ("cpu", "bfloat16", FIXED_POINT_ISA.encode()):
        limit = fixed_point_bound(typed(x, "bfloat16"), typed(weight, "bfloat16"))
    assert np.all(np.abs(y.asnumpy() - expected) <= limit)
    if backend.dtype != "float32":
        assert np.any(np.abs(typed(expected, backend.dtype).values - expected) > limit), "a rounded result would pass"


def test_swiglu_equals_the_reference(backend: Backend) -> None:
    graph = Graph(backend.swiglu())
    for count in TOKENS:
        x = values(backend, 1, count, 96)
        assert_near(backend, graph(tensor(backend, x))[0], reference.swiglu(x))


def test_add_equals_the_reference(backend: Backend) -> None:
    graph = Graph(backend.add())
    for count in TOKENS:
        a, b = values(backend, 1, count, 40), values(backend, 2, count, 40)
        assert_near(backend, graph(tensor(backend, a), tensor(backend, b))[0], a + b)


class Attention(nn.Cell):
    """Rotates queries and keys, stores keys and values, then computes attention."""

    def __init__(self, backend: Backend, num_blocks: int) -> None:
        super().__init__()
        shape = AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 0.25)
        cache = CacheShape(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)
        self.key_cache, self.value_cache = backend.kv_cache(num_blocks, 16, cache)
        self.split = backend.split((NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM))
        self.rotary, self.store = backend.rotary(HEAD_DIM), backend.store_kv()
        self.attention = backend.paged_attention(shape)
        self.seen = backend.attention_mask(48, 16)

    def construct(
        self, qkv: Any, cos: Any, sin: Any, slots: Any, positions: Any, tables: Any, query_lens: Any, contexts: Any
    ) -> Any:
        q, k, v = self.split(qkv)
        q, k = self.rotary(q, k, cos, sin, contexts)
        q = ops.depend(q, self.store(k, v, self.key_cache, self.value_cache, slots))
        seen = self.seen(positions, tables)
        return self.attention(q, self.key_cache, self.value_cache, tables, query_lens, contexts, seen)


def test_attention_over_mixed_steps_equals_the_reference(backend: Backend) -> None:
    if (backend.name, backend.dtype) == ("cpu", "float32"):
        pytest.skip("Ascend's primitives of attention take no float32; whole layers do")
    graph = Graph(Attention(backend, 12))
    key_cache, value_cache = np.zeros((2, 12, 16, NUM_KV_HEADS, HEAD_DIM))
    q_size, kv_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    computed = {0: 0, 1: 0, 2: 0}
    blocks = {0: [3, 8, 1], 1: [0, 11], 2: [5]}
    # Tokens of each request in each step: a whole prompt beside chunks and decode rows.
    for step, counts in enumerate([{0: 20}, {0: 1, 1: 7}, {1: 20, 0: 1, 2: 5}, {2: 1, 0: 1, 1: 1}]):
        total = sum(counts.values())
        qkv = values(backend, 10 + step, total, q_size + 2 * kv_size)
        angles = np.tile(np.random.default_rng(step).uniform(0, 6, (total, HEAD_DIM // 2)), 2)
        cos, sin = (typed(f(angles), backend.dtype).values.astype(np.float32) for f in (np.cos, np.sin))
        slots, positions = [], []
        for request, count in counts.items():
            for position in range(computed[request], computed[request] + count):
                positions.append(position)
                slots.append(blocks[request][position // 16] * 16 + position % 16)
            computed[request] += count
        width = max(len(blocks[request]) for request in counts)
        tables = np.array([blocks[request] + [0] * (width - len(blocks[request])) for request in counts])
        lens = list(counts.values()), [computed[request] for request in counts]
        slots[-1] = -1 if step == 3 else slots[-1]
        q, k, v = np.split(qkv, [q_size, q_size + kv_size], axis=1)
        q, k = (reference.rotary(x, cos, sin) for x in (q, k))
        reference.store_kv(k, v, key_cache, value_cache, np.array(slots))
        expected = reference.attention(q, key_cache, value_cache, tables, *lens, 0.25)
        floats = (tensor(backend, array) for array in (qkv, cos, sin))
        result = graph(*floats, *map(integers, (slots, positions, tables, *lens)))[0]
        assert_near(backend, result, expected, 4.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_slot_outside_the_cache_raises(dtype: str) -> None:
    backend = create_backend("cpu", dtype)
    qkv = tensor(backend, values(backend, 1, 1, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM))
    ones = tensor(backend, np.ones((1, HEAD_DIM)))
    attention = Attention(backend, 2)
    with pytest.raises(RuntimeError):
        attention(qkv, ones, ones, *map(integers, ([32], [0], [[0]], [1], [1]))).asnumpy()
