"""What the operator `decoder` refuses."""

import numpy as np
import pytest
from decoder_calls import EPS, HIDDEN, NUM_KV_HEADS, Step, create_decoder, mixed_step, parameters
from kernel_calls import FIXED_POINT_ISA, Typed, integers, packed, status_of, typed
from kernels_cache import SCALE, Cache
from llm_serving.kernels import library

CACHE_RULE = (
    "caches must be [num_blocks, block_size, num_kv_heads, head_dim] of the type of the rows, block_size and head_dim "
    "multiples of 16"
)


def floats(*shape: int, dtype: str = "bfloat16") -> Typed:
    return typed(np.ones(shape), dtype)


def refusal(num_layers: int = 1, **changes: Typed) -> str:
    """What `decoder` says of parameters of which some are changed; it must have written nothing."""
    decoder = create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=False, num_layers=num_layers, positions=12)
    caches = [Cache("bfloat16", num_kv_heads=NUM_KV_HEADS, head_dim=16) for _ in range(num_layers)]
    given = parameters(decoder, Step([5, 69], [0, 1], [0, 1], [[0]], [2], [2], [1]), caches) | changes
    before = given["logits"].bits.copy()
    assert status_of("decoder", *given.values()) != 0
    assert not any(cache.key.bits.any() or cache.value.bits.any() for cache in caches)
    assert np.array_equal(given["logits"].bits, before)
    return library.last_error().removeprefix("decoder: ")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("qkv", (128 * HIDDEN,), "bfloat16", "weights must have two dimensions"),
        ("qkv", (128, 46), "bfloat16", "qkv must be packed, [128, 45], of the type of the table"),
        ("qkv", (128, 45), "float16", "qkv must be packed, [128, 45], of the type of the table"),
        ("out", (46, 64), "bfloat16", "out must be packed, [45, 64], of the type of the table"),
        ("gate_up", (100, 45), "bfloat16", "gate_up must be packed, [200, 45], of the type of the table"),
        ("down", (44, 100), "bfloat16", "down must be packed, [45, 100], of the type of the table"),
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
        ("qkv1", packed(floats(160, 45)), "qkv must be packed, [128, 45], of the type of the table"),
        ("down1", packed(floats(45, 101)), "down must be packed, [45, 100], of the type of the table"),
        ("qkv1", floats(128 * HIDDEN), "weights must have two dimensions"),
        ("vectors1", floats(91), "vectors must have 90 elements of the type of the table"),
    ],
)
def test_a_layer_unlike_the_first_is_refused(name: str, changed: Typed, message: str) -> None:
    assert refusal(num_layers=2, **{name: changed}) == message


@pytest.mark.parametrize(
    ("name", "shape"),
    [("qkv", (128, 45)), ("out", (45, 64)), ("gate_up", (200, 45)), ("down", (45, 100)), ("head", (70, 45))],
)
def test_a_weight_that_is_not_packed_is_refused(name: str, shape: tuple[int, int]) -> None:
    weight = floats(*shape)
    # A packed weight that has been freed may have had its address.
    library.load().llm_release_weight(weight.array.ctypes.data)
    n, k = shape
    assert refusal(**{name: weight}) == f"{name} must be packed, [{n}, {k}], of the type of the table"


@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down", "head"])
def test_a_weight_packed_for_another_instruction_set_is_refused(name: str) -> None:
    if FIXED_POINT_ISA not in library.supported_isas():
        pytest.skip(f"needs a CPU with {FIXED_POINT_ISA}")
    with library.isa_in_use(FIXED_POINT_ISA):
        decoder = create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=False)
        weight = getattr(decoder if name == "head" else decoder.layers[0], name)
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
    assert refusal(**changes) == f"vectors must have {num_elements} elements of the type of the table"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": integers(np.ones((70, HIDDEN)))}, "table must be floats [V, H], and gain [H] of their type"),
        ({"table": floats(70 * HIDDEN)}, "table must be floats [V, H], and gain [H] of their type"),
        ({"gain": floats(HIDDEN - 1)}, "table must be floats [V, H], and gain [H] of their type"),
        ({"gain": floats(HIDDEN, dtype="float16")}, "table must be floats [V, H], and gain [H] of their type"),
        ({"constants": typed([SCALE, EPS, 0], "float32")}, "constants must be four of float32"),
        ({"constants": integers([1, 1, 0, 0])}, "constants must be four of float32"),
        ({"head": floats(70 * HIDDEN)}, "weights must have two dimensions"),
        ({"head": packed(floats(70, 44))}, "head must be packed, [70, 45], of the type of the table"),
        ({"logits": floats(1, 70)}, "the result must be float32 [S, V]"),
        ({"logits": floats(70, dtype="float32")}, "the result must be float32 [S, V]"),
        ({"logits": floats(2, 70, dtype="float32")}, "the result must be float32 [S, V]"),
        ({"logits": floats(1, 71, dtype="float32")}, "the result must be float32 [S, V]"),
    ],
)
def test_ends_of_the_network_that_do_not_fit_are_refused(changes: dict[str, Typed], message: str) -> None:
    assert refusal(**changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": integers([70, 0])}, "index 70 is outside the 70 rows of the table"),
        ({"token_ids": integers([0, -1])}, "index -1 is outside the 70 rows of the table"),
        ({"token_ids": floats(2)}, "indices must be int32 or int64"),
        ({"positions": integers([0, 12])}, "positions[1] = 12 is outside the 12 rows of cos and sin"),
        ({"positions": integers([-1, 1])}, "positions[0] = -1 is outside the 12 rows of cos and sin"),
        ({"positions": integers([0])}, "positions must be int32 or int64, one for each of 2 rows"),
        ({"positions": floats(2)}, "positions must be int32 or int64, one for each of 2 rows"),
        ({"slot_mapping": integers([0])}, "qkv must have 1 rows of 64 queries and of 32 keys and values"),
        ({"slot_mapping": integers([0, 384])}, "slot_mapping[1] = 384 is outside the 384 slots of the cache"),
        ({"slot_mapping": integers([-2, 1])}, "slot_mapping[0] = -2 is outside the 384 slots of the cache"),
        ({"slot_mapping": floats(2)}, "slot_mapping must be int32 or int64"),
        ({"cos": floats(24, 8)}, "cos and sin must be tables [positions, 16] of the type of qkv"),
        ({"cos": floats(12 * 16)}, "cos and sin must be tables [positions, 16] of the type of qkv"),
        ({"sin": floats(11, 16)}, "cos and sin must be tables [positions, 16] of the type of qkv"),
        ({"sin": floats(12, 16, dtype="float32")}, "cos and sin must be tables [positions, 16] of the type of qkv"),
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


@pytest.mark.parametrize("num_parameters", [14, 20, 22, 27])
def test_parameters_of_whole_layers_are_expected(num_parameters: int) -> None:
    decoder = create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=False, num_layers=2)
    step, caches = mixed_step("bfloat16", 16)
    given = list(parameters(decoder, step, caches[:2]).values())
    assert status_of("decoder", *given[:num_parameters]) != 0
    assert library.last_error().endswith(f"expects 13 parameters, 7 for each layer, and a result, got {num_parameters}")
