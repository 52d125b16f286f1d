"""Single operations of `program`, compared with NumPy."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from llm_serving.network.experts import Expert, ExpertRouting
from llm_serving.network.operations import Value, Weight
from llm_serving.network.program import assemble
from llm_serving.network.rewriting import select_rows
from support import network_reference
from support.decoder_calls import Step
from support.kernel_calls import (
    FLOAT32_UNIT,
    FLOAT_TYPES,
    ROUNDING_UNIT,
    Array,
    Typed,
    assert_close,
    block_weight,
    typed,
)
from support.kernels import reference
from support.kernels_cache import padded
from support.program_calls import Runnable, create_caches, run, runnable_of
from support.single_operations import program_with, random, result_of, step_of_rows


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("first", "width", "group"), [(0, 70, 0), (20, 60, 20), (16, 48, 16), (3, 64, 64)])
def test_program_rms_norm_of_rows_and_groups_equals_the_reference(
    isa: str, dtype: str, wide: bool, first: int, width: int, group: int
) -> None:
    x = random(33, 100, dtype)
    gain = typed(np.random.default_rng(2).standard_normal(group or width), "float32" if wide else dtype)

    def body(net: Network, whole: Value) -> Value:
        net._gamma_transform = (lambda values: values) if wide else None
        return net.rms_norm(net.split(whole, first, width)[1], "gain", group=group)

    y = result_of(x, width, body, {"gain.weight": gain.values})
    expected = reference.rms_norm(x.values[:, first : first + width], gain.values, 1e-5)
    assert_close(Typed(y.array, dtype) if dtype == "float32" else typed(y.array, dtype), expected, 1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("bias", "group"), [(True, 0), (False, 0), (True, 16)])
def test_program_layer_norm_equals_the_reference(isa: str, dtype: str, bias: bool, group: int) -> None:
    """Rows far from zero; each group of columns has its own gamma and beta."""
    x = typed(np.random.default_rng(1).standard_normal((33, 48)) + 3, dtype)
    gamma, beta = (typed(np.random.default_rng(seed).standard_normal(48), dtype) for seed in (2, 3))
    values = {"norm.weight": gamma.values} | ({"norm.bias": beta.values} if bias else {})
    y = result_of(x, 48, lambda net, whole: net.layer_norm(whole, "norm", bias=bias, group=group), values)
    rows = x.values.astype(np.float64).reshape(33, -1, group or 48)
    centred = rows - rows.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = scaled.reshape(33, 48) * gamma.values + (beta.values if bias else 0)
    assert_close(typed(y.array, dtype), expected, 3e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("function", ["silu", "gelu_tanh", "gelu"])
def test_program_activation_without_gate_equals_the_reference(isa: str, dtype: str, function: str) -> None:
    x = typed(np.random.default_rng(1).standard_normal((9, 100)) * 4, dtype)
    y = result_of(x, 100, lambda net, whole: net.activation(whole, function))
    expected = network_reference._activation(None, x.values.astype(np.float32), function)
    assert_close(typed(y.array, dtype), expected, np.abs(expected) * 1e-5 + 2e-6)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("function", ["gelu", "clamped"])
def test_program_gates_equal_the_reference(isa: str, dtype: str, function: str) -> None:
    x = typed(np.random.default_rng(1).standard_normal((9, 200)) * 6, dtype)
    y = result_of(x, 100, lambda net, whole: net.gated_activation(whole, function))
    expected = network_reference._gated_activation(None, x.values.astype(np.float32), function)
    assert_close(typed(y.array, dtype), expected, np.abs(expected) * 1e-5 + 1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_gelu_gate_equals_the_reference(isa: str, dtype: str) -> None:
    x = typed(np.random.default_rng(1).standard_normal((9, 200)) * 4, dtype)
    y = result_of(x, 100, lambda net, whole: net.gated_activation(whole, "gelu_tanh"))
    expected = reference.gelu_tanh_gated(x.values)
    assert_close(typed(y.array, dtype), expected, np.abs(expected) * 1e-5 + 1e-6)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_program_scaled_add_rounds_once(isa: str, dtype: str, scale: float) -> None:
    x = random(40, 90, dtype)
    y = result_of(x, 45, lambda net, whole: net.add(*net.split(whole, 45, 45), scale=scale))
    a, b = np.split(x.values.astype(np.float32), 2, axis=1)
    assert np.array_equal(typed(y.array, dtype).bits, typed(a + b * np.float32(scale), dtype).bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_scaled_embedding_equals_the_reference(isa: str, dtype: str) -> None:
    x = random(40, 45, dtype)
    net = Network(45, 40)
    net.lm_head(net.embedding("x", scale=3.3), "one")
    values = {w: x.values if w.names[0] == "x.weight" else np.eye(45) for w in net.weights}
    with library.use_isa("plain"):
        runnable = runnable_of(net, values, dtype)
    y = run(runnable, step_of_rows(40), [])
    assert np.array_equal(typed(y.array, dtype).bits, typed(x.values.astype(np.float32) * np.float32(3.3), dtype).bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_sigmoid_gate_equals_the_reference(isa: str, dtype: str) -> None:
    x = random(33, 51, dtype)
    y = result_of(x, 50, lambda net, whole: net.sigmoid_gate(*net.split(whole, 50, 1)))
    expected = reference.sigmoid_gate(x.values[:, :50], x.values[:, 50:])
    assert_close(typed(y.array, dtype), expected, np.abs(expected) * 1e-6)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("function", ["", "silu", "sigmoid", "relu"])
def test_program_multiply_equals_the_reference(isa: str, dtype: str, function: str) -> None:
    x = random(33, 102, dtype)
    y = result_of(x, 51, lambda net, whole: net.multiply(*net.split(whole, 51, 51), function=function))
    a, b = np.split(x.values.astype(np.float64), 2, axis=1)
    functions = {"": b, "silu": b / (1 + np.exp(-b)), "sigmoid": 1 / (1 + np.exp(-b)), "relu": np.maximum(b, 0)}
    expected = a * functions[function]
    assert_close(typed(y.array, dtype), expected, np.abs(expected) * 1e-6)


def test_program_scaled_and_capped_logits_equal_the_reference(isa: str) -> None:
    x = typed(np.concatenate([np.geomspace(1e-6, 300, 40), [np.inf, 0.0]]) * [[1], [-1]], "float32")
    net = Network(42, 2)
    net.lm_head(net.embedding("x"), "one", scale=0.5, cap=30.0)
    values = {w: np.nan_to_num(x.values, posinf=1e30, neginf=-1e30) if w.names[0] == "x.weight" else np.eye(42)
              for w in net.weights}  # fmt: skip
    y = run(runnable_of(net, values, "float32"), step_of_rows(2), [])
    expected = reference.softcap(x.values, 0.5, 30.0)
    assert_close(y, expected, np.abs(expected) * 2.0**-21)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_adds_a_bias_to_logits_in_float32(isa: str, dtype: str) -> None:
    x, bias = random(5, 40, dtype), np.random.default_rng(2).standard_normal(40).astype(np.float32)
    net = Network(40, 5)
    net.lm_head(net.embedding("x"), "one", scale=0.5, bias=True)
    given = {"x.weight": x.values, "one.weight": np.eye(40), "one.bias": bias}
    with library.use_isa("plain"):
        runnable = runnable_of(net, {weight: given[weight.names[0]] for weight in net.weights}, dtype)
    y = run(runnable, step_of_rows(5), [])
    assert np.array_equal(y.array, (x.values.astype(np.float32) + bias) * np.float32(0.5))


ATTENTION = {
    "window": {"window": 37},
    "narrow window": {"window": 1},
    "cap": {"largest": 3.0},
    "slopes": {"slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "chunks": {"chunk": 37},
    "chunks of one": {"chunk": 1},
    "chunks of 64": {"chunk": 64},
    "all": {"window": 70, "largest": 5.0, "slopes": np.array([1.0, 0.3, 0.1, 0.0], np.float32)},
}
SCALE = 0.2
COUNT = 150
TABLE = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7]
SLOTS = [TABLE[i // 16] * 16 + i % 16 for i in range(COUNT)]


def attention_of(
    x: Typed, head_dim: int, largest: float = 0.0, window: int = 0, slopes: Array | None = None, chunk: int = 0
) -> Runnable:
    """Rows of x are queries of four heads, and keys and values of two."""
    weight = None if slopes is None else Weight(("slopes",), (4,), ((4,),), dtype="float32")

    def body(net: Network, whole: Value) -> Value:
        q, k, v = net.split(whole, 4 * head_dim, 2 * head_dim, 2 * head_dim)
        layer = net.store_kv(k, v, 2)
        return net.attention(q, layer, scale=SCALE, window=window, cap=largest, slopes=weight, chunk=chunk)

    return program_with(x, 4 * head_dim, body, {"slopes": slopes})


@pytest.mark.parametrize(("dtype", "head_dim"), list(zip(FLOAT_TYPES, (16, 64, 80), strict=True)))
@pytest.mark.parametrize("kind", ATTENTION)
def test_program_attention_with_window_cap_and_alibi_equals_the_reference(
    isa: str, dtype: str, head_dim: int, kind: str
) -> None:
    step = step_of_rows(COUNT, [TABLE], [COUNT])
    step = Step(**{**vars(step), "slots": SLOTS})
    runnable = attention_of(random(COUNT, 8 * head_dim, dtype), head_dim, **ATTENTION[kind])
    y = run(runnable, step, create_caches(runnable))
    assert_close(typed(y.array, dtype), *expected_attention(dtype, head_dim, kind))


@functools.cache  # for all instruction sets
def expected_attention(dtype: str, head_dim: int, kind: str) -> tuple[Array, Array]:
    """Reference attention of random rows, and the largest error of a result."""
    options = ATTENTION[kind]
    x = random(COUNT, 8 * head_dim, dtype).values.astype(np.float64)
    q, k, v = np.split(x, [4 * head_dim, 6 * head_dim], axis=1)
    caches = [np.zeros((24, 16, 2, head_dim)) for _ in range(2)]
    reference.store_kv(k, v, *caches, np.array(SLOTS))
    given = padded([TABLE]).array, [COUNT], [COUNT], SCALE
    expected = reference.attention(q, *caches, *given, **options)
    magnitude = reference.attention(q, caches[0], np.abs(caches[1]), *given, **options)
    # As in test_attention.py; a cap and its distance add their own rounding to a score.
    score = 2 * head_dim * FLOAT32_UNIT * np.abs(q).max() * np.abs(k).max() * head_dim * SCALE
    score += 8 * FLOAT32_UNIT * (options.get("largest", 0.0) + COUNT)
    delta = np.expm1(score) + 8 * FLOAT32_UNIT + ROUNDING_UNIT[dtype] + 4 * COUNT * FLOAT32_UNIT
    return expected, 2.2 * delta * magnitude + ROUNDING_UNIT[dtype] * np.abs(expected)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_ignores_tokens_before_the_window(isa: str, dtype: str) -> None:
    head_dim, count, window, token = 48, 150, 37, 50
    clean = random(count, 8 * head_dim, dtype)
    dirty = clean.values.astype(np.float64)
    dirty[token, 4 * head_dim :] = np.nan
    table = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7]
    step = step_of_rows(count, [table], [count])
    step = Step(**{**vars(step), "slots": [table[i // 16] * 16 + i % 16 for i in range(count)]})
    results = []
    for x in (clean, typed(dirty, dtype)):
        runnable = attention_of(x, head_dim, window=window)
        results.append(run(runnable, step, create_caches(runnable)))
    whole, result = results
    sees = np.arange(count)[(np.arange(count) >= token) & (np.arange(count) < token + window)]
    assert np.array_equal(np.delete(result.bits, sees, axis=0), np.delete(whole.bits, sees, axis=0))
    assert np.isnan(result.array[sees]).all()


@pytest.mark.parametrize("limit", [{"window": 100}, {"window": 1100}, {"chunk": 100}, {"chunk": 1024}, {"chunk": 1100}])
def test_program_window_across_attention_segments_equals_the_reference(isa: str, limit: dict[str, int]) -> None:
    """The windows or chunks of the rows begin before, at and after position 1,024. Blocks before all windows have
    arbitrary content."""
    head_dim, count, context = 16, 60, 1170
    x = random(context, 8 * head_dim, "float32")
    table = list(range(74))
    runnable = attention_of(x, head_dim, **limit)
    step = step_of_rows(context, [table], [context])
    caches = create_caches(runnable, num_blocks=80)
    whole = run(runnable, Step(**{**vars(step), "slots": list(range(context))}), caches)
    q, k, v = np.split(x.values.astype(np.float64), [4 * head_dim, 6 * head_dim], axis=1)
    dense = [each.reshape(-1, 1, 2, head_dim) for each in (k, v)]
    given = np.arange(context)[None], [count], [context], SCALE
    expected = reference.attention(q[-count:], *dense, *given, **limit)
    assert_close(Typed(whole.array[-count:], "float32"), expected, 1e-4)
    for threads in (1, 3):
        with library.use_threads(threads):
            for row in (1023, 1024, 1060, 1123, 1124, 1169):
                one = Step([row], [0], [-1], [table], [1], [row + 1], [0])
                assert np.array_equal(run(runnable, one, caches).bits[0], whole.bits[row]), (threads, row)


ROUTING = [
    {},
    {"normalise": False, "scale": 2.5},
    {"sigmoid": True},
    {"groups": 4, "top_groups": 2},
    {"sigmoid": True, "groups": 4, "top_groups": 2, "corrected": True},
    {"normalise": False, "factors": True},
    {"margin": 0.7},
]


@pytest.mark.parametrize("options", ROUTING)
@pytest.mark.parametrize("ties", [False, True])
def test_program_routes_rows_to_top_k_experts(isa: str, options: dict[str, Any], ties: bool) -> None:
    """Expert e uses column e only, so a row's result shows its expert weights."""
    count, num_experts, top_k = 50, 16, 3
    options = dict(options)
    rng = np.random.default_rng(5)
    logits = rng.integers(-2, 3, (count, num_experts)) if ties else rng.standard_normal((count, num_experts))
    correction = rng.standard_normal(num_experts).astype(np.float32) if options.pop("corrected", False) else None
    x = typed(np.concatenate([logits, np.ones((count, 16))], axis=1), "float32")
    gate_up = np.zeros((num_experts, 32, 32))
    gate_up[:, [0, 16], 16] = 1.0  # gate and up of one
    down = np.zeros((num_experts, 32, 16))
    down[np.arange(num_experts), np.arange(num_experts), 0] = 1 + np.exp(-1.0)
    factors = rng.standard_normal(num_experts).astype(np.float32) if options.pop("factors", False) else None
    margin = options.pop("margin", 0.0)
    names = [Expert(f"{i}.gate", f"{i}.up", f"{i}.down") for i in range(num_experts)]
    sigmoid, of_groups = (
        options.get("sigmoid", False),
        {k: options[k] for k in ("groups", "top_groups") if k in options},
    )
    routing = ExpertRouting(
        top_k,
        "sparsemixer" if margin else "sigmoid" if sigmoid else "softmax",
        options.get("normalise", True),
        options.get("scale", 1.0),
        correction=None if correction is None else "correction",
        factors=None if factors is None else "factors",
        margin=margin,
        **of_groups,
    )
    arrays = {
        "router.weight": np.eye(num_experts, 32),
        "0.gate.weight": gate_up.reshape(-1, 32),
        "0.down.weight": down.reshape(-1, 16),
        "correction": correction,
        "factors": factors,
    }
    y = result_of(x, 32, lambda net, whole: net.experts(whole, "router", routing, names, 16), arrays)
    if margin:
        shares, chosen = reference.route_by_sparse_mixer(x.array[:, :num_experts], top_k, margin)
    else:
        shares, chosen = reference.route(x.values[:, :num_experts], top_k, correction=correction, **options)
    shares = shares if factors is None else shares * factors[chosen]
    expected = np.zeros((count, 32))
    np.put_along_axis(expected, chosen, shares, axis=1)
    assert np.max(np.abs(y.array - expected)) < 1e-5


def experts_of(dtype: str, x: Typed, unread: int | None = None) -> Runnable:
    """Seven experts of which rows choose two; one may consist of NaN and is never chosen."""
    rng = np.random.default_rng(6)
    hidden, inner, count = x.array.shape[1], 48, 7
    gate_up = rng.standard_normal((count, 2 * inner, hidden)) / np.sqrt(hidden)
    down = rng.standard_normal((count, hidden, inner)) / np.sqrt(inner)
    router = rng.standard_normal((count, hidden))
    if unread is not None:
        gate_up[unread] = down[unread] = np.nan
        router[unread] = 0
    arrays = {
        "router.weight": router,
        "0.gate.weight": gate_up.reshape(-1, hidden),
        "0.down.weight": down.reshape(-1, inner),
    }
    names = [Expert(f"{i}.gate", f"{i}.up", f"{i}.down") for i in range(count)]
    return program_with(
        x, hidden, lambda net, whole: net.experts(whole, "router", ExpertRouting(2), names, inner), arrays
    )


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_experts_equal_the_reference_up_to_rounding(isa: str, dtype: str) -> None:
    x = random(60, 80, dtype)
    runnable = experts_of(dtype, x)
    rng = np.random.default_rng(6)
    gate_up = typed(rng.standard_normal((7, 96, 80)) / np.sqrt(80), dtype).values
    down = typed(rng.standard_normal((7, 80, 48)) / np.sqrt(48), dtype).values
    router = typed(rng.standard_normal((7, 80)), dtype).values
    shares, chosen = reference.route(reference.linear(x.values, router), 2)
    expected = reference.experts(x.values, shares, chosen, gate_up, down)
    y = run(runnable, step_of_rows(60), [])
    # Gates, their products with up and the result are rounded to the type; sums over 80 and 48 stay below 4.
    assert_close(typed(y.array, dtype), expected, 16 * ROUNDING_UNIT[dtype] + 1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_experts_are_batch_invariant(isa: str, dtype: str) -> None:
    x = random(60, 80, dtype)
    runnable = experts_of(dtype, x)
    whole = run(runnable, step_of_rows(60), []).bits
    rng = np.random.default_rng(7)
    for threads in (1, 2):
        with library.use_threads(threads):
            for count in (1, 2, 17, 59):
                rows = rng.permutation(60)[:count].tolist()
                step = Step(**{**vars(step_of_rows(count)), "token_ids": rows})
                assert np.array_equal(run(runnable, step, []).bits, whole[rows]), (threads, count)


def random_blocks(rng: np.random.Generator, n: int, k: int, bits: int) -> BlockTensor:
    qvalues = rng.integers(0, 2**bits, (n, k), np.uint8)
    scales = rng.uniform(1, 2, (n, k // 32)) * 2.0 ** (1 - bits) / np.sqrt(k)
    return BlockTensor(qvalues, bits, 32, 2 ** (bits - 1), scales.astype(np.float16))


@pytest.mark.parametrize("bits", [(8, 8, 8, 8, 8), (4, 4, 8, 5, 4)], ids=["one type", "three types"])
def test_program_experts_in_blocks_are_close_to_those_of_the_values(isa_of_codes: str, bits: tuple[int, ...]) -> None:
    rng = np.random.default_rng(9)
    x, count, hidden, inner = random(60, 64, "float32"), len(bits), 64, 96
    in_blocks = {
        "0.gate.weight": [random_blocks(rng, 2 * inner, hidden, each) for each in bits],
        "0.down.weight": [random_blocks(rng, hidden, inner, each) for each in bits],
    }
    arrays = {name: np.concatenate([each.dequantized() for each in parts]) for name, parts in in_blocks.items()}
    arrays["router.weight"] = rng.standard_normal((count, hidden)).astype(np.float32)
    names = [Expert(f"{i}.gate", f"{i}.up", f"{i}.down") for i in range(count)]
    runnable = program_with(
        x, hidden, lambda net, whole: net.experts(whole, "router", ExpertRouting(2), names, inner), arrays
    )
    expected = run(runnable, step_of_rows(60), []).values
    numbered = zip(runnable.program.weights, runnable.weights, strict=True)
    weights = [
        block_weight(in_blocks[weight.names[0]], "float32") if weight.names[0] in in_blocks else given
        for weight, given in numbered
    ]
    runnable = replace(runnable, weights=weights)
    found = run(runnable, step_of_rows(60), [])
    assert np.max(np.abs(found.values - expected)) < 0.03 * np.max(np.abs(expected))
    step = Step(**{**vars(step_of_rows(1)), "token_ids": [7]})
    assert np.array_equal(run(runnable, step, []).bits, found.bits[7:8])


@pytest.mark.parametrize("count", [1, 2, 60])
def test_program_reads_each_selected_expert_once(count: int) -> None:
    rng = np.random.default_rng(8)
    x = random(60, 80, "float32")
    router, names = rng.standard_normal((7, 80)), [Expert(f"{i}.gate", f"{i}.up", f"{i}.down") for i in range(7)]
    arrays = {"router.weight": router, "0.gate.weight": np.ones((7 * 96, 80)), "0.down.weight": np.ones((7 * 80, 48))}
    runnable = program_with(x, 80, lambda net, whole: net.experts(whole, "router", ExpertRouting(2), names, 48), arrays)
    _, chosen = reference.route(reference.linear(x.values[:count], router), 2)
    before = library.load().llm_num_weight_bytes()
    run(runnable, step_of_rows(count), [])
    router_and_head, expert = 7 * 80 + 80 * 80, 96 * 80 + 80 * 48
    assert library.load().llm_num_weight_bytes() - before == 4 * (router_and_head + len(np.unique(chosen)) * expert)


def test_program_reads_selected_experts_only(isa: str) -> None:
    x = random(60, 80, "float32")
    x = Typed(np.abs(x.array), "float32")
    whole = run(experts_of("float32", x, unread=4), step_of_rows(60), []).values
    assert 0 < np.isnan(whole).any(axis=1).sum() < 60
    chosen = np.flatnonzero(np.isfinite(whole).all(axis=1)).tolist()
    step = Step(**{**vars(step_of_rows(len(chosen))), "token_ids": chosen})
    assert np.array_equal(run(experts_of("float32", x, unread=4), step, []).values, whole[chosen])


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_fused_gelu_gate_equals_separate_operations(isa: str, dtype: str) -> None:
    x = random(40, 70, dtype)
    weight = np.random.default_rng(3).standard_normal((96, 70))

    def body(net: Network, whole: Value) -> Value:
        return net.gated_activation(net.linear(whole, "w", 96), "gelu_tanh")

    together = program_with(x, 48, body, {"w.weight": weight})
    net = Network(70, 40, 1e-5)
    net.lm_head(body(net, net.embedding("x")), "one")
    assert len(assemble(select_rows(net.operations), dtype).instructions) == len(together.program.instructions) + 1
    y = run(together, step_of_rows(40), [])
    product = result_of(x, 96, lambda net, whole: net.linear(whole, "w", 96), {"w.weight": weight})
    gates = typed(product.array, dtype)
    expected = result_of(gates, 48, lambda net, whole: net.gated_activation(whole, "gelu_tanh"))
    assert np.array_equal(y.bits, expected.bits)
