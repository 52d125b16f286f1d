"""Features of families in the operator `program`, compared with the NumPy reference of the description."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from llm_serving.network.builder import Network
from llm_serving.network.operations import Weight
from llm_serving.network.program import assemble
from llm_serving.network.rewriting import select_rows
from support.decoder_calls import Step
from support.family_configs import CONFIGS, RandomTensors, config_of
from support.kernel_calls import Array, Typed
from support.network_reference import parameters, step_of_prompt
from support.network_reference import run as run_reference
from support.program_calls import BLOCK_SIZE, Blocks, Runnable, States, create_caches, run, runnable_of

PROMPT = 150
ERROR = 1e-4
"""Bound for logits of magnitude 1, far above the effect of another order of float32 sums."""


@functools.cache
def network(name: str) -> Network:
    config = config_of(name)
    return describe(config["architectures"][0], ConfigReader(config, name))


@functools.cache
def weights_of(name: str) -> dict[Weight, Array]:
    return parameters(network(name), RandomTensors(), PROMPT)


def runnable(name: str, dtype: str) -> Runnable:
    return runnable_of(network(name), weights_of(name), dtype)


@functools.cache
def logits_by_reference(name: str) -> Array:
    """Of the whole prompt."""
    step = step_of_prompt(tokens_of(PROMPT), network(name), every=True)
    return run_reference(network(name).operations, weights_of(name), step)


def tokens_of(count: int) -> list[int]:
    return np.random.default_rng(3).integers(0, 97, count).tolist()


def step_of(tokens: list[int], table: list[int], first: int, last: int) -> Step:
    """Tokens `first` to `last` of a request whose blocks are these; every row gives a result."""
    at = range(first, last)
    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in at]
    return Step(tokens[first:last], list(at), slots, [table], [last - first], [last], list(range(last - first)))


def together(*steps: Step) -> Step:
    """Steps of one request each, combined to one step."""
    starts = np.cumsum([0, *(len(step.token_ids) for step in steps)]).tolist()
    joined = {
        name: [each for step in steps for each in getattr(step, name)]
        for name in ("token_ids", "positions", "slots", "tables", "query_lens", "context_lens")
    }
    samples = [start + i for start, step in zip(starts, steps, strict=False) for i in step.samples]
    return Step(**joined, samples=samples)


BEFORE_LAST, LAST = 1, 2
"""Slots of the states before the last two rows of a prompt, and before the last row."""


def in_parts(
    runnable: Runnable, tokens: list[int], table: list[int], ends: list[int]
) -> tuple[Array, list[Blocks], States]:
    """Bits of all logits of a prompt that is computed in chunks with these ends."""
    caches, states = create_caches(runnable), States.of(runnable)
    parts = []
    for first, last in zip([0, *ends], ends, strict=False):
        out = [{ends[-1] - 3: BEFORE_LAST, ends[-1] - 2: LAST}.get(row, -1) for row in range(first, last - 1)]
        slots = states.at([0 if first else -1], [*out, 0])
        parts.append(run(runnable, step_of(tokens, table, first, last), caches, slots).bits)
    return np.concatenate(parts), caches, states


@pytest.mark.parametrize("name", CONFIGS)
def test_program_logits_of_families_equal_the_reference(isa: str, name: str) -> None:
    expected = logits_by_reference(name)
    given = runnable(name, "float32")
    table = [7, 3, 9, 1, 20, 4, 8, 2, 11, 15]
    logits = run(given, step_of(tokens_of(PROMPT), table, 0, PROMPT), create_caches(given)).array
    assert np.std(expected) > 0.01
    assert np.max(np.abs(logits - expected)) < ERROR * max(1, np.std(expected))


@pytest.mark.parametrize(("name", "dtype"), list(zip(CONFIGS, itertools.cycle(["bfloat16", "float16"]), strict=False)))
def test_program_rewriting_changes_no_bit(isa: str, name: str, dtype: str) -> None:
    net = network(name)
    short = runnable(name, dtype)
    program = assemble(select_rows(net.operations), dtype, net)
    weights = dict(zip(short.program.weights, short.weights, strict=True))
    long = replace(short, program=program, weights=[weights[each] for each in program.weights])
    assert len(program.instructions) > len(short.program.instructions)
    step = replace(step_of(tokens_of(40), [2, 0, 1], 0, 40), samples=[39, 0])
    caches, others = create_caches(short), create_caches(long)
    assert np.array_equal(run(short, step, caches).bits, run(long, step, others).bits)
    for one, other in zip(caches, others, strict=True):
        assert np.array_equal(one.key.bits, other.key.bits)
        assert np.array_equal(one.value.bits, other.value.bits)


@pytest.mark.parametrize(("name", "dtype"), list(zip(CONFIGS, itertools.cycle(["bfloat16", "float32"]), strict=False)))
def test_program_of_families_is_batch_invariant(isa: str, name: str, dtype: str) -> None:
    given = runnable(name, dtype)
    tokens, table = tokens_of(PROMPT), [7, 3, 9, 1, 20, 4, 8, 2, 11, 15]
    whole, caches, states = in_parts(given, tokens, table, [PROMPT])
    with library.use_threads(1):
        parts, others, other_states = in_parts(given, tokens, table[::-1], [1, 2, 65, 66, 130, PROMPT])
    assert np.array_equal(parts, whole)
    # Two rows of the prompt beside a chunk of another request.
    beside = step_of(tokens_of(40)[::-1], [21, 22, 23], 0, 40)
    last = step_of(tokens, table, PROMPT - 2, PROMPT)
    slots = states.at([-1, BEFORE_LAST], [-1] * 42)
    assert np.array_equal(run(given, together(beside, last), caches, slots).bits[-2:], whole[-2:])
    last = step_of(tokens, table[::-1], PROMPT - 1, PROMPT)
    slots = other_states.at([LAST], [-1])
    assert np.array_equal(run(given, replace(last, samples=[0]), others, slots).bits, whole[-1:])


@pytest.mark.parametrize("name", CONFIGS)
def test_program_of_families_writes_nothing_for_an_empty_step(name: str) -> None:
    given = runnable(name, "float32")
    caches = create_caches(given)
    assert run(given, step_of([], [0], 0, 0), caches).array.shape == (0, 97)
    assert not any(cache.key.bits.any() or cache.value.bits.any() for cache in caches)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_program_reads_no_blocks_before_the_window(isa: str, name: str, dtype: str) -> None:
    given = runnable(name, dtype)
    tokens, table = tokens_of(PROMPT), [7, 3, 9, 1, 20, 4, 8, 2, 11, 15]
    whole, _, _ = in_parts(given, tokens, table, [PROMPT])
    for first in (PROMPT - 1, PROMPT - 20, 70):
        _, caches, _ = in_parts(given, tokens, table, [first])
        freed = (first - 7 + 1) // BLOCK_SIZE
        for cache in caches:
            for part in (cache.key, cache.value):
                part.array[table[:freed]] = not_a_number(part)
        step = step_of(tokens, [*([-5] * freed), *table[freed:]], first, PROMPT)
        assert np.array_equal(run(given, step, caches).bits, whole[first:]), first


def not_a_number(part: Typed) -> Array:
    return np.array(0x7FC0, np.uint16) if part.dtype == "bfloat16" else np.array(np.nan, part.array.dtype)
