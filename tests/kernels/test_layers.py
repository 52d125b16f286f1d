import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from kernel_calls import (
    FIXED_POINT_ISA,
    FLOAT_TYPES,
    Typed,
    call,
    empty,
    integers,
    linear,
    packed,
    scalar,
    status_of,
    typed,
)
from kernels_cache import SCALE, Cache, filled, padded, rows
from llm_serving.kernels import library

NUM_HEADS, NUM_KV_HEADS = 4, 2
# Neither fills whole registers or panels. With inner features this many, rows of gate and up are the widest where
# head_dim is 16, and rows of query, key and value where it is 48.
HIDDEN, INNER = 45, 100
# Both fill panels, so that gate and up are gated at once; bfloat16 is read in several passes that end with half a tile.
WIDE_HIDDEN, WIDE_INNER = 304, 1072
EPS = 1e-5
CACHE_RULE = (
    "caches must be [num_blocks, block_size, num_kv_heads, head_dim] of the type of the rows, block_size and head_dim "
    "multiples of 16"
)


@dataclass(frozen=True)
class Layer:
    """Weights [N, K], packed, and vectors [N]; biases are None where the layer has none. Each goes with a cache."""

    gain: Typed
    mlp_gain: Typed
    qkv_bias: Typed | None
    out_bias: Typed | None
    gate_up_bias: Typed | None
    down_bias: Typed | None
    qkv: Typed
    out: Typed
    gate_up: Typed
    down: Typed

    @property
    def vectors(self) -> Typed:
        """Gains and biases behind one another."""
        present = [value for field in fields(self) if (value := getattr(self, field.name)) and value.array.ndim == 1]
        return Typed(np.concatenate([vector.array for vector in present]), self.gain.dtype)

    @property
    def constants(self) -> Typed:
        return typed([SCALE, EPS, self.qkv_bias is not None, self.gate_up_bias is not None], "float32")


@dataclass(frozen=True)
class Step:
    """What a step computes: rows of hidden, cos and sin, and where they belong."""

    hidden: Typed
    cos: Typed
    sin: Typed
    slots: list[int]
    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    samples: list[int]

    def part(self, request: int, first: int, last: int) -> "Step":
        """Rows `first` to `last` of one request as a step of their own, of which every row samples."""
        start = sum(self.query_lens[:request])
        index = slice(start + first, start + last)
        context_len = self.context_lens[request] - self.query_lens[request] + last
        hidden, cos, sin = (tensor.rows(index) for tensor in (self.hidden, self.cos, self.sin))
        return Step(
            hidden,
            cos,
            sin,
            self.slots[index],
            [self.tables[request]],
            [last - first],
            [context_len],
            list(range(last - first)),
        )


def create_layer(
    dtype: str,
    head_dim: int,
    *,
    attention_bias: bool,
    mlp_bias: bool,
    hidden: int = HIDDEN,
    inner: int = INNER,
    seed: int = 1,
) -> Layer:
    rng = np.random.default_rng(seed)
    q_width = NUM_HEADS * head_dim
    qkv_width = q_width + 2 * NUM_KV_HEADS * head_dim

    def vector(size: int, present: bool = True) -> Typed | None:
        return typed(rng.standard_normal(size), dtype) if present else None

    def weight(n: int, k: int) -> Typed:
        return packed(typed(rng.standard_normal((n, k)) / np.sqrt(k), dtype))

    gains = (typed(rng.standard_normal(hidden), dtype) for _ in range(2))
    attention_biases = (vector(size, attention_bias) for size in (qkv_width, hidden))
    mlp_biases = (vector(size, mlp_bias) for size in (2 * inner, hidden))
    shapes = (qkv_width, hidden), (hidden, q_width), (2 * inner, hidden), (hidden, inner)
    return Layer(*gains, *attention_biases, *mlp_biases, *(weight(*shape) for shape in shapes))


def create_layers(dtype: str, head_dim: int, *, attention_bias: bool, mlp_bias: bool, **sizes: int) -> list[Layer]:
    biases = {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    return [create_layer(dtype, head_dim, **biases, **sizes, seed=seed) for seed in (1, 2, 3)]


def mixed_step(dtype: str, head_dim: int, hidden_size: int = HIDDEN) -> tuple[Step, list[Cache]]:
    """A whole prompt, a decode row and a chunk, one of whose keys is not stored; caches have what lies before.

    Rows sample in another order than theirs, one of them twice.
    """
    tables, query_lens, context_lens = [[3, 1, 4, 7, 5], [9, 2, 6], [8, 0]], [70, 1, 9], [70, 33, 20]
    step, caches = step_of(dtype, head_dim, hidden_size, tables, query_lens, context_lens)
    step.slots[75] = -1
    return replace(step, samples=[79, 70, 3, 70]), caches


def step_of(
    dtype: str,
    head_dim: int,
    hidden_size: int,
    tables: list[list[int]],
    query_lens: list[int],
    context_lens: list[int],
) -> tuple[Step, list[Cache]]:
    """Every row samples."""
    rng = np.random.default_rng(2)
    caches = [Cache(dtype, num_kv_heads=NUM_KV_HEADS, head_dim=head_dim) for _ in range(3)]
    slots: list[int] = []
    for table, query_len, context_len in zip(tables, query_lens, context_lens, strict=True):
        for cache in caches:
            filled(rng, cache, table, context_len - query_len)
        slots += caches[0].slots(table, context_len - query_len, context_len)
    count = sum(query_lens)
    hidden, cos, sin = (rows(rng, count, width, dtype) for width in (hidden_size, head_dim, head_dim))
    return Step(hidden, cos, sin, slots, tables, query_lens, context_lens, list(range(count))), caches


def by_operators(layer: Layer, step: Step, cache: Cache) -> Typed:
    """Every row of a layer, by the operators that `decoder_layers` stands for."""
    dtype, count = step.hidden.dtype, len(step.hidden.array)
    eps, rstd = scalar(EPS, "float32"), empty((count, 1), "float32")
    normed, middle, result = (empty(step.hidden.array.shape, dtype) for _ in range(3))

    def multiplied(x: Typed, weight: Typed, bias: Typed | None) -> Typed:
        product = linear(x, weight)
        if bias is not None:
            repeated = Typed(np.tile(bias.array, (count, 1)), dtype)
            call("AddExt", product, repeated, scalar(1, "int64"), product)
        return product

    call("RmsNorm", step.hidden, layer.gain, eps, normed, rstd)
    qkv = multiplied(normed, layer.qkv, layer.qkv_bias)
    ends = np.cumsum([NUM_HEADS, NUM_KV_HEADS]) * cache.head_dim
    q, k, v = (Typed(np.ascontiguousarray(part), dtype) for part in np.split(qkv.array, ends, axis=1))
    turned_q, turned_k = empty(q.array.shape, dtype), empty(k.array.shape, dtype)
    call("ApplyRotaryPosEmb", q, k, step.cos, step.sin, integers([1]), scalar(2, "int64"), turned_q, turned_k)
    cache.store(turned_k, v, step.slots)
    attended = cache.attend(turned_q, step.tables, step.query_lens, step.context_lens)
    change = multiplied(attended, layer.out, layer.out_bias)
    call("AddRmsNorm", change, step.hidden, layer.mlp_gain, eps, normed, rstd, middle)
    gate_up = multiplied(normed, layer.gate_up, layer.gate_up_bias)
    gated = empty((count, layer.down.array.shape[1]), dtype)
    call("Swiglu", gate_up, scalar(-1, "int64"), gated)
    change = multiplied(gated, layer.down, layer.down_bias)
    call("AddExt", change, middle, scalar(1, "int64"), result)
    return result


def parameters(layers: list[Layer], step: Step, caches: list[Cache]) -> dict[str, Typed]:
    """Of `decoder_layers`, in its order; those of a layer under their name and, from the second on, its number."""
    given = {
        "hidden": step.hidden,
        "cos": step.cos,
        "sin": step.sin,
        "slot_mapping": integers(step.slots),
        "block_tables": padded(step.tables),
        "query_lens": integers(step.query_lens),
        "context_lens": integers(step.context_lens),
        "sample_indices": integers(step.samples),
        "constants": layers[0].constants,
    }
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        of_layer = {"vectors": layer.vectors, "qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up}
        of_layer |= {"down": layer.down, "key_cache": cache.key, "value_cache": cache.value}
        given |= {f"{name}{number or ''}": value for name, value in of_layer.items()}
    return given | {"result": empty((len(step.samples), step.hidden.array.shape[1]), step.hidden.dtype)}


def in_one(layers: list[Layer], step: Step, caches: list[Cache]) -> Typed:
    """Layers as one operator."""
    given = parameters(layers, step, caches)
    call("decoder_layers", *given.values())
    return given["result"]


def same_bits(caches: list[Cache], others: list[Cache]) -> bool:
    pairs = zip(caches, others, strict=True)
    return all(np.array_equal(a.key.bits, b.key.bits) and np.array_equal(a.value.bits, b.value.bits) for a, b in pairs)


def assert_same_as_by_operators(
    layers: list[Layer],
    create_step: Callable[[], tuple[Step, list[Cache]]],
    thread_counts: tuple[int, ...] = (1, 2),
    infinite_columns: tuple[int, ...] = (),
) -> None:
    step, apart = create_step()
    expected = step.hidden
    for layer, cache in zip(layers, apart, strict=True):
        expected = by_operators(layer, replace(step, hidden=expected), cache)
    assert np.all(np.isfinite(np.delete(expected.values, infinite_columns, axis=1)))
    for threads in thread_counts:
        _, together = create_step()
        with library.threads_in_use(threads):
            result = in_one(layers, step, together)
        assert np.array_equal(result.bits, expected.bits[step.samples]), threads
        assert same_bits(together, apart), threads


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("head_dim", [16, 48])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_bits_are_those_of_the_operators_it_stands_for(
    isa: str, dtype: str, head_dim: int, attention_bias: bool, mlp_bias: bool
) -> None:
    layers = create_layers(dtype, head_dim, attention_bias=attention_bias, mlp_bias=mlp_bias)
    assert_same_as_by_operators(layers, lambda: mixed_step(dtype, head_dim))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("biases", [False, True])
def test_bits_of_layers_that_fill_panels_and_several_passes(isa: str, dtype: str, biases: bool) -> None:
    sizes = {"hidden": WIDE_HIDDEN, "inner": WIDE_INNER}
    layers = create_layers(dtype, 48, attention_bias=biases, mlp_bias=biases, **sizes)
    assert_same_as_by_operators(layers, lambda: mixed_step(dtype, 48, WIDE_HIDDEN))


@pytest.mark.parametrize("num_rows", [17, 33, 70, 225])
def test_bits_of_prompts_that_are_cut_into_several_blocks_of_rows(isa: str, num_rows: int) -> None:
    layers = create_layers("bfloat16", 16, attention_bias=False, mlp_bias=True, hidden=80, inner=272)
    table = list(range(-(-num_rows // 16)))
    assert_same_as_by_operators(layers, lambda: step_of("bfloat16", 16, 80, [table], [num_rows], [num_rows]), (2,))


@pytest.mark.parametrize(("hidden", "inner"), [(HIDDEN, INNER), (WIDE_HIDDEN, WIDE_INNER)])
def test_bits_of_a_layer_one_of_whose_weights_cannot_be_multiples_of_units(isa: str, hidden: int, inner: int) -> None:
    layers = create_layers("bfloat16", 16, attention_bias=False, mlp_bias=False, hidden=hidden, inner=inner)
    weight = np.random.default_rng(7).standard_normal((hidden, inner)) / np.sqrt(inner)
    weight[3, 5] = np.inf
    layers[-1] = replace(layers[-1], down=packed(typed(weight, "bfloat16")))
    assert_same_as_by_operators(layers, lambda: mixed_step("bfloat16", 16, hidden), infinite_columns=(3,))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(HIDDEN, INNER), (WIDE_HIDDEN, WIDE_INNER)])
def test_rows_do_not_depend_on_what_is_computed_beside_them(isa: str, dtype: str, hidden: int, inner: int) -> None:
    layers = create_layers(dtype, 16, attention_bias=True, mlp_bias=True, hidden=hidden, inner=inner)
    step, together = mixed_step(dtype, 16, hidden)
    step = replace(step, samples=list(range(len(step.slots))))
    whole = in_one(layers, step, together).bits
    for threads in (1, 2):
        _, caches = mixed_step(dtype, 16, hidden)
        chunks = [(2, 0, 9), (0, 0, 1), (0, 1, 33), (1, 0, 1), (0, 33, 70)]
        with library.threads_in_use(threads):
            results = {chunk: in_one(layers, step.part(*chunk), caches).bits for chunk in chunks}
        assert np.array_equal(np.concatenate([results[chunk] for chunk in sorted(chunks)]), whole), threads
        assert same_bits(caches, together), threads


@pytest.mark.parametrize("samples", [[], [2, 0] * 8])
@pytest.mark.parametrize(("hidden", "inner"), [(HIDDEN, INNER), (WIDE_HIDDEN, WIDE_INNER)])
def test_fewer_and_more_rows_may_sample_than_there_are(isa: str, samples: list[int], hidden: int, inner: int) -> None:
    layers = create_layers("bfloat16", 16, attention_bias=True, mlp_bias=True, hidden=hidden, inner=inner)
    whole, caches = mixed_step("bfloat16", 16, hidden)
    step = whole.part(2, 0, 9)
    every = in_one(layers, step, caches).bits
    assert np.array_equal(in_one(layers, replace(step, samples=samples), caches).bits, every[samples])


def test_a_step_without_rows_writes_nothing(isa: str) -> None:
    layers = create_layers("bfloat16", 16, attention_bias=True, mlp_bias=True)
    step, caches = mixed_step("bfloat16", 16)
    in_one(layers, replace(step.part(1, 0, 0), context_lens=[0]), caches)
    assert same_bits(caches, mixed_step("bfloat16", 16)[1])


def test_the_end_of_a_step_is_announced_once(isa: str) -> None:
    layers = create_layers("bfloat16", 16, attention_bias=False, mlp_bias=False)
    step, caches = mixed_step("bfloat16", 16)
    master, agent = socket.socketpair()
    with master, agent:
        for frame in (b"never sent", b"ending\0soon"):
            library.load().llm_announce_ending(agent.fileno(), frame, len(frame))
        for _ in range(2):
            in_one(layers, step, caches)
        agent.shutdown(socket.SHUT_WR)
        assert master.makefile("rb").read() == b"ending\0soon"


def test_an_announcement_that_nobody_hears_is_none(isa: str) -> None:
    layers = create_layers("bfloat16", 16, attention_bias=False, mlp_bias=False)
    step, caches = mixed_step("bfloat16", 16)
    expected = in_one(layers, step, caches).bits
    master, agent = socket.socketpair()
    master.close()
    with agent:
        library.load().llm_announce_ending(agent.fileno(), b"ending", 6)
        assert np.array_equal(in_one(layers, step, mixed_step("bfloat16", 16)[1]).bits, expected)


def floats(*shape: int, dtype: str = "bfloat16") -> Typed:
    return typed(np.ones(shape), dtype)


def refusal(num_layers: int = 1, **changes: Typed) -> str:
    """What `decoder_layers` says of parameters of which some are changed; it must have written nothing."""
    layers = [create_layer("bfloat16", 16, attention_bias=False, mlp_bias=False) for _ in range(num_layers)]
    caches = [Cache("bfloat16", num_kv_heads=NUM_KV_HEADS, head_dim=16) for _ in range(num_layers)]
    step = Step(floats(2, HIDDEN), floats(2, 16), floats(2, 16), [0, 1], [[0]], [2], [2], [1])
    given = parameters(layers, step, caches)
    before = given["result"].bits.copy()
    assert status_of("decoder_layers", *(given | changes).values()) != 0
    assert not any(cache.key.bits.any() or cache.value.bits.any() for cache in caches)
    assert np.array_equal(given["result"].bits, before)
    return library.last_error().removeprefix("decoder_layers: ")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("qkv", (128 * HIDDEN,), "bfloat16", "weights must have two dimensions"),
        ("qkv", (128, 46), "bfloat16", "weight 0 must be packed, [128, 45], of the type of hidden"),
        ("qkv", (128, 45), "float16", "weight 0 must be packed, [128, 45], of the type of hidden"),
        ("out", (46, 64), "bfloat16", "weight 1 must be packed, [45, 64], of the type of hidden"),
        ("gate_up", (100, 45), "bfloat16", "weight 2 must be packed, [200, 45], of the type of hidden"),
        ("down", (44, 100), "bfloat16", "weight 3 must be packed, [45, 100], of the type of hidden"),
        ("qkv", (48, 45), "bfloat16", "qkv must have 2 rows of 64 queries and of 32 keys and values"),
        ("qkv", (120, 45), "bfloat16", "qkv must have 2 rows of 64 queries and of 32 keys and values"),
        ("out", (45, 48), "bfloat16", "qkv must have 2 rows of 48 queries and of 32 keys and values"),
        ("out", (45, 384), "bfloat16", "qkv must have 2 rows of 384 queries and of 32 keys and values"),
    ],
)
def test_weights_of_another_shape_or_type_are_refused(
    name: str, shape: tuple[int, ...], dtype: str, message: str
) -> None:
    weight = floats(*shape, dtype=dtype)
    assert refusal(**{name: packed(weight) if len(shape) == 2 else weight}) == message


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qkv1", packed(floats(160, 45)), "weight 0 must be packed, [128, 45], of the type of hidden"),
        ("down1", packed(floats(45, 101)), "weight 3 must be packed, [45, 100], of the type of hidden"),
        ("qkv1", floats(128 * HIDDEN), "weights must have two dimensions"),
        ("vectors1", floats(91), "vectors must have 90 elements of the type of hidden"),
    ],
)
def test_a_layer_unlike_the_first_is_refused(name: str, changed: Typed, message: str) -> None:
    assert refusal(num_layers=2, **{name: changed}) == message


@pytest.mark.parametrize(("name", "position"), [("qkv", 0), ("out", 1), ("gate_up", 2), ("down", 3)])
def test_a_weight_that_is_not_packed_is_refused(name: str, position: int) -> None:
    shape = getattr(create_layer("bfloat16", 16, attention_bias=False, mlp_bias=False), name).array.shape
    weight = floats(*shape)
    # A packed weight that has been freed may have had its address.
    library.load().llm_release_weight(weight.array.ctypes.data)
    n, k = shape
    assert refusal(**{name: weight}) == f"weight {position} must be packed, [{n}, {k}], of the type of hidden"


@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down"])
def test_a_weight_packed_for_another_instruction_set_is_refused(name: str) -> None:
    if FIXED_POINT_ISA not in library.supported_isas():
        pytest.skip(f"needs a CPU with {FIXED_POINT_ISA}")
    with library.isa_in_use(FIXED_POINT_ISA):
        weight = getattr(create_layer("bfloat16", 16, attention_bias=False, mlp_bias=False), name)
    with library.isa_in_use("avx512"):
        assert refusal(**{name: weight}) == "the weight was packed for another instruction set"


@pytest.mark.parametrize(
    ("changes", "num_elements"),
    [
        ({"vectors": floats(91)}, 90),
        ({"vectors": floats(90, dtype="float16")}, 90),
        ({"constants": typed([SCALE, EPS, 1, 0], "float32")}, 90 + 128 + 45),
        ({"constants": typed([SCALE, EPS, 0, 1], "float32")}, 90 + 200 + 45),
    ],
)
def test_vectors_must_hold_gains_and_biases(changes: dict[str, Typed], num_elements: int) -> None:
    assert refusal(**changes) == f"vectors must have {num_elements} elements of the type of hidden"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": integers(np.ones((2, HIDDEN)))},
        {"hidden": floats(2 * HIDDEN)},
        {"constants": typed([SCALE, EPS, 0], "float32")},
        {"constants": integers([1, 1, 0, 0])},
    ],
)
def test_hidden_must_be_rows_of_floats_and_constants_four(changes: dict[str, Typed]) -> None:
    assert refusal(**changes) == "hidden must be floats [T, H], and constants four of float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": integers([0])}, "qkv must have 1 rows of 64 queries and of 32 keys and values"),
        ({"slot_mapping": integers([0, 384])}, "slot_mapping[1] = 384 is outside the 384 slots of the cache"),
        ({"slot_mapping": integers([-2, 1])}, "slot_mapping[0] = -2 is outside the 384 slots of the cache"),
        ({"slot_mapping": floats(2)}, "slot_mapping must be int32 or int64"),
        ({"cos": floats(2, 8)}, "cos and sin must have 2 rows of 16 elements of the type of qkv"),
        ({"sin": floats(2, 16, dtype="float32")}, "cos and sin must have 2 rows of 16 elements of the type of qkv"),
        ({"value_cache": floats(23, 16, 2, 16)}, CACHE_RULE),
        ({"context_lens": integers([17])}, "request 0 needs 2 blocks, its table has 1"),
        ({"block_tables": integers([[24]])}, "block 24 of request 0 is outside the 24 blocks of the cache"),
        ({"query_lens": floats(1, dtype="float32")}, "query_lens [B] must be int32 or int64"),
        ({"query_lens": integers([1])}, "query_lens add up to 1, q has 2 rows"),
        ({"sample_indices": integers([1, 2])}, "sample_indices[1] = 2 is outside the 2 rows"),
        ({"sample_indices": integers([-1])}, "sample_indices[0] = -1 is outside the 2 rows"),
        ({"sample_indices": floats(1)}, "sample_indices [S] must be int32 or int64"),
    ],
)
def test_steps_that_do_not_fit_are_refused(changes: dict[str, Typed], message: str) -> None:
    assert refusal(**changes) == message


def test_heads_that_do_not_share_those_of_the_cache_evenly_are_refused() -> None:
    weights = {"qkv": packed(floats(3 * 16 + 2 * 32, HIDDEN)), "out": packed(floats(HIDDEN, 3 * 16))}
    assert refusal(**weights) == "rows of q must hold 3 heads of 16 elements, shared by 2 heads of the cache"


@pytest.mark.parametrize("num_parameters", [10, 16, 18, 23])
def test_parameters_of_whole_layers_are_expected(num_parameters: int) -> None:
    layers = [create_layer("bfloat16", 16, attention_bias=False, mlp_bias=False) for _ in range(2)]
    step, caches = mixed_step("bfloat16", 16)
    given = list(parameters(layers, step, caches[:2]).values())
    assert status_of("decoder_layers", *given[:num_parameters]) != 0
    assert library.last_error().endswith(f"expects 9 parameters, 7 for each layer, and a result, got {num_parameters}")
