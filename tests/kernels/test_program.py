"""A Llama computed by the operator `program`, bit-identical to the separate operators."""

from dataclasses import replace

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.kernels.library import announce_ending
from support.decoder_calls import (
    HIDDEN,
    INNER,
    WIDE_HIDDEN,
    WIDE_INNER,
    Decoder,
    by_operators,
    create_decoder,
    mixed_step,
    same_bits,
    step_of,
)
from support.kernel_calls import FIXED_POINT_ISA, FLOAT_TYPES, packed, typed
from support.program_calls import llama_of, run


def assert_same_as_by_operators(decoder: Decoder, create_step, thread_counts=(1, 2)) -> None:
    step, apart = create_step()
    expected = by_operators(decoder, step, apart)
    assert np.all(np.isfinite(expected.values))
    runnable = llama_of(decoder)
    for threads in thread_counts:
        _, together = create_step()
        with library.use_threads(threads):
            logits = run(runnable, step, together)
        assert np.array_equal(logits.bits, expected.bits[step.samples]), threads
        assert same_bits(together, apart), threads


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("head_dim", [16, 48])
@pytest.mark.parametrize(("attention_bias", "mlp_bias"), [(True, False), (False, True)])
def test_program_bits_equal_those_of_single_operators(
    isa: str, dtype: str, head_dim: int, attention_bias: bool, mlp_bias: bool
) -> None:
    decoder = create_decoder(dtype, head_dim, attention_bias=attention_bias, mlp_bias=mlp_bias)
    assert_same_as_by_operators(decoder, lambda: mixed_step(dtype, head_dim))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("biases", "tied"), [(False, True), (True, False)])
def test_program_bits_of_wide_layers_equal_single_operators(isa: str, dtype: str, biases: bool, tied: bool) -> None:
    sizes = {"hidden": WIDE_HIDDEN, "inner": WIDE_INNER}
    decoder = create_decoder(dtype, 48, attention_bias=biases, mlp_bias=biases, tied=tied, **sizes)
    assert_same_as_by_operators(decoder, lambda: mixed_step(dtype, 48))


@pytest.mark.parametrize("num_rows", [17, 33, 70, 225])
def test_program_bits_of_long_prompts_equal_single_operators(isa: str, num_rows: int) -> None:
    sizes = {"hidden": 80, "inner": 272, "positions": 225}
    decoder = create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=True, **sizes)
    table = list(range(-(-num_rows // 16)))
    assert_same_as_by_operators(decoder, lambda: step_of("bfloat16", 16, [table], [num_rows], [num_rows]), (2,))


@pytest.mark.parametrize(
    ("name", "hidden", "inner"),
    [(name, HIDDEN, INNER) for name in ("qkv", "out", "gate_up", "down", "head")]
    + [(name, WIDE_HIDDEN, WIDE_INNER) for name in ("down", "head")],
)
def test_program_bits_with_a_float32_weight_equal_single_operators(
    isa: str, name: str, hidden: int, inner: int
) -> None:
    decoder = create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=False, hidden=hidden, inner=inner)
    shape = getattr(decoder if name == "head" else decoder.layers[1], name).array.shape
    values = np.random.default_rng(7).standard_normal(shape) / np.sqrt(shape[1])
    with library.use_isa(next(isa for isa in library.supported_isas() if isa != FIXED_POINT_ISA)):
        weight = {name: packed(typed(values, "bfloat16"))}
    if name == "head":
        decoder = replace(decoder, **weight)
    else:
        decoder.layers[1] = replace(decoder.layers[1], **weight)
    assert_same_as_by_operators(decoder, lambda: mixed_step("bfloat16", 16), (2,))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(HIDDEN, INNER), (WIDE_HIDDEN, WIDE_INNER)])
def test_program_is_batch_invariant(isa: str, dtype: str, hidden: int, inner: int) -> None:
    runnable = llama_of(create_decoder(dtype, 16, attention_bias=True, mlp_bias=True, hidden=hidden, inner=inner))
    step, together = mixed_step(dtype, 16)
    step = replace(step, samples=list(range(len(step.slots))))
    whole = run(runnable, step, together).bits
    for threads in (1, 2):
        _, caches = mixed_step(dtype, 16)
        chunks = [(2, 0, 9), (0, 0, 1), (0, 1, 33), (1, 0, 1), (0, 33, 70)]
        with library.use_threads(threads):
            results = {chunk: run(runnable, step.part(*chunk), caches).bits for chunk in chunks}
        assert np.array_equal(np.concatenate([results[chunk] for chunk in sorted(chunks)]), whole), threads
        assert same_bits(caches, together), threads


@pytest.mark.parametrize("samples", [[], [2, 0] * 8])
def test_program_samples_any_number_of_rows(isa: str, samples: list[int]) -> None:
    runnable = llama_of(create_decoder("bfloat16", 16, attention_bias=True, mlp_bias=True))
    whole, caches = mixed_step("bfloat16", 16)
    step = whole.part(2, 0, 9)
    every = run(runnable, step, caches).bits
    assert np.array_equal(run(runnable, replace(step, samples=samples), caches).bits, every[samples])


def test_program_writes_nothing_for_an_empty_step(isa: str) -> None:
    runnable = llama_of(create_decoder("bfloat16", 16, attention_bias=True, mlp_bias=True))
    step, caches = mixed_step("bfloat16", 16)
    run(runnable, replace(step.part(1, 0, 0), context_lens=[0]), caches)
    assert same_bits(caches, mixed_step("bfloat16", 16)[1])


def test_program_announces_the_end_of_a_step_once(isa: str) -> None:
    runnable = llama_of(create_decoder("bfloat16", 16, attention_bias=False, mlp_bias=False))
    step, caches = mixed_step("bfloat16", 16)
    announced: list[str] = []
    announce_ending(lambda: announced.append("before"))
    announce_ending(lambda: announced.append("ending"))
    for _ in range(2):
        run(runnable, step, caches)
    assert announced == ["ending"]
    announce_ending(lambda: announced.append("again"))
    announce_ending(None)
    run(runnable, step, caches)
    assert announced == ["ending"]
