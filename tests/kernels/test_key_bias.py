"""Keys with a bias: kernels add it before the rotation, subtract an offset after it, and round the result once."""

from typing import Any

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from llm_serving.network.caches import INT8_SCALE_BYTES
from llm_serving.network.key_bias import move_key_biases, without_bias
from llm_serving.network.operations import Weight
from llm_serving.network.rope import Rotary
from support.decoder_calls import Step
from support.kernel_calls import FLOAT32_UNIT, FLOAT_TYPES, Array, Typed, assert_close, typed
from support.kernels import reference
from support.kernels_cache import SCALE
from support.program_calls import BLOCK_SIZE, Blocks, Runnable, run, runnable_of

COUNT = 40
HEADS = 2


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def step_of_prompt() -> Step:
    every = list(range(COUNT))
    return Step(every, every, every, [[0, 1, 2]], [COUNT], [COUNT], every)


def values_of(net: Network, given: dict[str, Array]) -> dict[Weight, Any]:
    def value(weight: Weight) -> Array:
        if weight.generate is not None:
            return weight.generate(64)
        array = given[weight.names[0]]
        if weight.rows is not None:
            array = np.where(np.array(weight.rows) < 0, 0, array[list(weight.rows)])
        return array if weight.transform is None else weight.transform(array.astype(np.float32))

    return {weight: value(weight) for weight in net.weights}


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_rope_with_bias_and_offset_rounds_once(isa: str, dtype: str, head_dim: int) -> None:
    width = HEADS * head_dim
    net = Network(width, width, 1e-5)
    rotary = Rotary(head_dim, head_dim - 4, 1e4)
    x = net.embedding("x")
    bias, offset = (Weight((name,), (width,), ((width,),), dtype="float32") for name in ("bias", "offset"))
    net.lm_head(net.rope(x, rotary, offset), "one")
    operations = [each.changed(weights={"bias": bias}) if each.kind == "rope" else each for each in net.operations]
    net = net.changed(operations=operations)
    rows = typed(normal(1, COUNT, width), dtype)
    given = {"x.weight": rows.values, "one.weight": np.eye(width), "bias": 100 * normal(2, width)}
    given |= {"offset": 100 * normal(3, width)}
    with library.use_isa("plain"):
        runnable = runnable_of(net, values_of(net, given), dtype)
    y = run(runnable, step_of_prompt(), [])
    added = rows.values.astype(np.float32) + given["bias"].astype(np.float32)
    tables = [typed(table(COUNT), dtype).values for table in (rotary.cos, rotary.sin)]
    expected = reference.rotary(added, *tables) - given["offset"].astype(np.float32)
    assert_close(typed(y.array, dtype), expected, np.full_like(expected, 2000 * FLOAT32_UNIT))


def attention_with_bias(given: dict[str, Array], dtype: str, head_dim: int, kind: str) -> Runnable:
    """Build an attention with a key bias. `kind`: "none": no offset; "fused": an offset, and the rotary embedding is
    part of the attention operation; "separate": an offset, and the rotary embedding is an operation of its own.
    """
    width = HEADS * head_dim
    net = Network(width, width, 1e-5)
    rotary = Rotary(head_dim, head_dim, 1e6)
    qkv = net.linear(net.embedding("x"), "qkv", 3 * width, bias=True)
    product = net.operations[-1]
    q, k, v = net.split(qkv, width, width, width)
    _, bias = without_bias(product, k)
    offset = Weight(bias.names, (width,), bias.stored_shapes, bias.rows, None, rotary.mean_rotated, dtype="float32")
    stored = net.store_kv(net.rope(k, rotary, None if kind == "none" else offset), v, HEADS)
    y = net.attention(net.rope(q, rotary), stored, scale=SCALE)
    if kind == "separate":  # another reader of the rotated queries prevents the fused operation
        y = net.add(y, net.rope(q, rotary), 0.0)
    net.lm_head(y, "one")
    net = net.changed(operations=move_key_biases(net.operations))
    with library.use_isa("plain"):
        return runnable_of(net, values_of(net, given), dtype)


def cache_of(runnable: Runnable, *, int8: bool) -> Blocks:
    (shape,) = runnable.caches
    if not int8:
        return Blocks.of(shape, runnable.dtype, 3)
    rows = (3, BLOCK_SIZE, HEADS, shape.key_width + INT8_SCALE_BYTES)
    return Blocks(*(Typed(np.zeros(rows, np.int8), "int8") for _ in range(2)))


def tensors(head_dim: int) -> dict[str, Array]:
    """Return tensors with a key bias of 300 in the last pair of each head, which hardly rotates in 40 positions."""
    width = HEADS * head_dim
    bias = normal(3, 3 * width)
    of_keys = bias[width : 2 * width].reshape(HEADS, 2, head_dim // 2)
    of_keys[..., -1] = 300
    rows = typed(normal(1, COUNT, width), "bfloat16").values
    weight = typed(normal(2, 3 * width, width) / width**0.5, "bfloat16").values
    return {"x.weight": rows, "qkv.weight": weight, "qkv.bias": bias, "one.weight": np.eye(width)}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_is_more_accurate_with_the_offset_of_its_keys(isa_of_codes: str, dtype: str, int8: bool) -> None:
    head_dim = 64
    given = tensors(head_dim)
    given["qkv.bias"] = typed(given["qkv.bias"], dtype).values
    in_float32 = attention_with_bias(given, "float32", head_dim, "fused")
    exact = run(in_float32, step_of_prompt(), [cache_of(in_float32, int8=False)])
    errors = []
    for kind in ("fused", "none"):
        runnable = attention_with_bias(given, dtype, head_dim, kind)
        y = run(runnable, step_of_prompt(), [cache_of(runnable, int8=int8)])
        errors.append(float(np.abs(y.array - exact.array).mean()))
    assert 3 * errors[0] < errors[1]


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_fused_attention_with_a_bias_equals_the_separate_operations(isa: str, dtype: str) -> None:
    given = tensors(32)
    results = []
    for kind in ("fused", "separate"):
        runnable = attention_with_bias(given, dtype, 32, kind)
        results.append(run(runnable, step_of_prompt(), [cache_of(runnable, int8=False)]).bits)
    assert np.array_equal(*results)
