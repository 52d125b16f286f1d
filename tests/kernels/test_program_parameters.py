"""Invalid parameters of the operator `program` are refused; no integers make it crash."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from llm_serving.network.program import KINDS, Program
from support.decoder_calls import HIDDEN, NUM_KV_HEADS, Step, create_decoder
from support.family_configs import RandomTensors, config_of
from support.kernel_calls import Typed, empty, integers, packed, status_of, typed
from support.kernels_cache import Cache
from support.network_reference import parameters as weights_of
from support.program_calls import Runnable, create_caches, llama_of, parameters, runnable_of, status_of_program

Change = Callable[[Program], dict[str, Typed]]
"""Changes parameters of a program."""
STEP = Step([5, 69], [0, 1], [0, 1], [[0]], [2], [2], [1])


def llama() -> tuple[Runnable, list[Cache]]:
    decoder = create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=False, num_layers=1, positions=12)
    return llama_of(decoder), [Cache("bfloat16", num_kv_heads=NUM_KV_HEADS, head_dim=16)]


def refusal(of_table: Mapping[tuple[int, int], int] = {}, **changes: Typed) -> str:
    """Return the error of `program` for changed parameters; it must have written nothing."""
    runnable, caches = llama()
    given = parameters(runnable, STEP, caches) | changes
    before = given["result"].bits.copy()
    assert status_of_program(given, of_table) != 0
    assert not any(cache.key.bits.any() or cache.value.bits.any() for cache in caches)
    assert np.array_equal(given["result"].bits, before)
    return library.last_error().removeprefix("program: ")


def with_word(kind: str, word: int, value: int) -> Change:
    """Of the first instruction of a kind."""

    def change(program: Program) -> dict[str, Typed]:
        instructions = program.instructions.copy()
        instructions[np.flatnonzero(instructions[1:, 0] == KINDS.index(kind))[0] + 1, word] = value
        return {"instructions": integers(instructions)}

    return change


def with_first(part: str, index: int, value: int) -> Change:
    """Of the first row of a part: of the instructions that is the header."""

    def change(program: Program) -> dict[str, Typed]:
        array = getattr(program, part).copy()
        array[0, index] = value
        return {part: integers(array)}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_first("instructions", 0, 1), "the version must be 12, is 1"),
        (with_first("instructions", 5, 3), "the model's type must be 0, 1 or 2, is 3"),
        (with_first("instructions", 5, 0), "weight 0 must be [V, H] of the model's type or int8"),
        (with_first("instructions", 4, 25), "instructions have 24 numbers, the header says 25"),
        (with_first("instructions", 1, 0), "the header says 0 weights, 1 layers, "),
        (with_first("instructions", 2, 2), "expects 9 parameters, "),
        (with_first("instructions", 6, 1), "expects 9 parameters, "),
        (with_first("instructions", 6, -1), "the header says "),
        (with_first("instructions", 3, 4), "operand 0: bytes "),
        (lambda _: {"instructions": integers(np.zeros((2, 4)))}, "instructions must be int32 [1 + n, L], L at least 8"),
        (lambda _: {"operands": integers(np.zeros((2, 5)))}, "operands must be int32 [m, 6]"),
        (with_first("operands", 0, -4), "operand 0: bytes -4 to "),
        (with_first("operands", 1, 3), "operand 0: columns 0 to 45 are not of a buffer of 3"),
        (with_first("operands", 2, 1), "operand 0: columns 1 to 46 are not of a buffer of 45"),
        (with_first("operands", 4, 2), "operand 0: selected must be 0 or 1, is 2, and its kind 0, 1 or 2, is 0"),
        (with_first("operands", 5, 3), "operand 0: selected must be 0 or 1, is 0, and its kind 0, 1 or 2, is 3"),
        (with_word("embedding", 0, 99), "instruction 0: there is no operation 99"),
        (with_word("embedding", 1, 99), "instruction 0 (embedding): there is no operand 99"),
        (with_word("embedding", 2, 99), "instruction 0 (embedding): there is no weight 99"),
        (with_word("embedding", 1, -1), "instruction 0 (embedding): y is absent"),
        (with_word("embedding", 2, -1), "instruction 0 (embedding): table is absent"),
        (with_word("rms_norm", 5, -1), "instruction 1 (rms_norm): gamma is absent"),
        (with_word("rms_norm", 8, 7), "instruction 1 (rms_norm): groups of 7 do not make 45 columns"),
        (with_word("rms_norm", 10, 99), "instruction 1 (rms_norm): there is no weight 99"),
        (with_word("linear", 4, -1), "instruction 2 (linear): weight is absent"),
        (with_word("linear", 10, 5), "instruction 2 (linear): function must be from 0 to 4, is 5"),
        (with_word("linear", 11, 0), "instruction 2 (linear): scale is of what is added to something"),
        (with_word("linear", 13, 0), "instruction 2 (linear): a product that is not gated lies as rows"),
        (with_word("linear", 14, 2), "instruction 2 (linear): 45 columns of x are not 2 heads"),
        (with_word("attention", 15, 1), "instruction 3 (attention): there is no layer 1"),
        (with_word("attention", 5, -1), "instruction 3 (attention): k and v go together"),
        (with_word("attention", 9, -1), "instruction 3 (attention): cos and sin go together"),
        (with_word("attention", 17, -1), "instruction 3 (attention): window must be 0 or more, is -1"),
        (with_word("gated_activation", 3, 0), "instruction 9 (gated_activation): function must be from 1 to 4, is 0"),
        (with_word("embedding", 5, -1), "instruction 0 (embedding): the table has rows from 0 on of -1"),
        (with_word("embedding", 5, 1), "index "),
        (with_word("lm_head", 1, -1), "instruction 12 (lm_head): x is absent"),
        (with_word("lm_head", 2, -1), "instruction 12 (lm_head): weight is absent"),
        (with_word("lm_head", 8, 71), "instruction 12 (lm_head): the result has 70 columns, the head 71 rows"),
        (with_word("lm_head", 8, 70), "instruction 12 (lm_head): this process computes with no other"),
    ],
)
def test_program_refuses_invalid_instructions(change: Change, message: str) -> None:
    assert refusal(**change(llama()[0].program)).startswith(message)


def floats(*shape: int, dtype: str = "bfloat16") -> Typed:
    return typed(np.ones(shape), dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": integers([70, 0])}, "index 70 is outside the 70 rows of the table"),
        ({"token_ids": floats(2)}, "token_ids [T] must be int32 or int64"),
        ({"positions": integers([0, 12])}, "positions[1] = 12 is outside the 12 rows of cos and sin"),
        ({"positions": integers([-1, 1])}, "positions[0] = -1 is less than 0"),
        ({"positions": integers([0])}, "positions must be int32 or int64, one for each of 2 rows"),
        ({"slot_mapping": integers([0, 384])}, "slot_mapping[1] = 384 is outside the 384 slots of the cache"),
        ({"slot_mapping": integers([-2, 1])}, "slot_mapping[0] = -2 is less than -1"),
        ({"context_lens": integers([17])}, "request 0 needs 2 blocks, its table has 1"),
        ({"block_tables": integers([[24]])}, "block 24 of request 0 is outside the 24 blocks of the cache"),
        ({"query_lens": integers([1])}, "query_lens add up to 1, q has 2 rows"),
        ({"sample_indices": integers([2])}, "sample_indices[0] = 2 is outside the 2 rows"),
        ({"result": empty((1, 71), "float32")}, "instruction 12 (lm_head): weight, weight 0, must be packed, [71, 45]"),
        ({"result": empty((2, 70), "float32")}, "the result must be float32, a row for each of 1 that give one"),
        ({"weight0": integers(np.ones((70, HIDDEN)))}, "weight 0 must be [V, H] of the model's type or int8"),
        ({"value0": floats(23, 16, 2, 16)}, "instruction 3 (attention): caches must be [num_blocks, block_size, "),
        (
            {"value0": floats(24, 16, 2, 32)},
            "instruction 3 (attention): keys and values must be of one width where there is no q_rope",
        ),
    ],
)
def test_program_refuses_invalid_step_inputs(changes: dict[str, Typed], message: str) -> None:
    assert refusal(**changes).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({(2, 1): -1}, "parameter 2 is of no known type and shape"),
        ({(2, 1): 6}, "parameter 2 is of no known type and shape"),
        ({(5, 2): -1}, "parameter 5 is of no known type and shape"),
        ({(5, 2): 5}, "parameter 5 is of no known type and shape"),
        ({(5, 4): -1}, "parameter 5 is of no known type and shape"),
    ],
)
def test_program_refuses_invalid_addresses(changes: dict[tuple[int, int], int], message: str) -> None:
    assert refusal(changes) == message


def test_program_refuses_an_invalid_address_table() -> None:
    done = empty((1,), "float32")
    table = integers(np.zeros((9, 7)), "int64")
    for given in (
        (integers(np.zeros((9, 6)), "int64"), done),
        (integers(np.zeros((9, 7))), done),
        (integers(np.zeros(7), "int64"), done),
        (table, table, done),
    ):
        assert status_of("program", *given) != 0
        assert library.last_error() == "program: expects a table of addresses, int64 [n, 7]"


def test_program_refuses_invalid_weights() -> None:
    row = llama()[0].program.instructions
    number = int(row[1:][row[1:, 0] == KINDS.index("linear")][0, 4])
    plain = floats(128, HIDDEN)
    library.load().llm_release_weight(plain.array.ctypes.data)
    for weight in (packed(floats(128, 46)), packed(floats(128, HIDDEN, dtype="float16")), floats(128 * HIDDEN), plain):
        rule = f"instruction 1 (rms_norm): the consumer, weight {number}, must be packed, of 45 columns"
        assert refusal(**{f"weight{number}": weight}) == rule
    rule = f"instruction 2 (linear): weight, weight {number}, must be packed, [128, 45], of the model's type"
    assert refusal(**{f"weight{number}": packed(floats(144, HIDDEN))}) == rule


STRANGE = (-(2**31), -2, -1, 0, 1, 2, 3, 15, 16, 17, 64, 1024, 2**16, 2**31 - 1)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2, experts", "gemma2", "deepseek2", "deepseek3.2", "qwen3-next", "nemotron-h"]
)
def test_program_with_any_integer_stays_within_its_memory(name: str) -> None:
    config = config_of(name) | {"index_topk": 1}  # so that the second row reads a selected key
    net = describe(config["architectures"][0], ConfigReader(config, name))
    runnable = runnable_of(net, weights_of(net, RandomTensors(), 64), "float32")
    rng = np.random.default_rng(8)
    refused = 0
    for _ in range(300):
        table, parts = rng.choice(["instructions", "operands"]), {}
        array = getattr(runnable.program, table).copy()
        row = rng.integers(0, len(array))
        words = (0, 1, 2, 4) if table == "instructions" and row == 0 else range(array.shape[1])
        array[row, rng.choice(words)] = rng.choice(STRANGE)
        parts[table] = array
        changed = replace(runnable, program=replace(runnable.program, **parts))
        given: dict[str, Any] = parameters(changed, STEP, create_caches(runnable))
        refused += status_of_program(given) != 0
    assert 50 < refused < 300
