"""The sampler of the library against its definition in NumPy: equal, bit for bit, whatever the logits."""

import ctypes
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llm_serving.errors import KernelError
from llm_serving.kernels import library
from llm_serving.worker import sampler, sampling_reference
from llm_serving.worker.sampler import LibrarySampler, check_sampling, choose_tokens_for, sample
from llm_serving.worker.sampling_reference import uniform
from support.instruction_sets import real_isas
from support.step_factories import sampling_input, select_samples

NO_TOKENS = np.empty(0, np.int32)
VOCAB_SIZES = (1, 2, 17, 64, 1000, 32_000)
LOGITS = {
    "normal": lambda rng, shape: rng.normal(scale=3, size=shape),
    "sharp": lambda rng, shape: rng.normal(scale=30, size=shape),
    "flat": lambda rng, shape: rng.normal(scale=1e-3, size=shape),
    "equal": lambda rng, shape: np.full(shape, -2.5),
    "tied": lambda rng, shape: rng.integers(-3, 4, shape),
    "zeros": lambda rng, shape: rng.choice([0.0, -0.0], shape),
    "subnormal": lambda rng, shape: rng.integers(-9, 10, shape) * 1e-44,
    "huge": lambda rng, shape: rng.uniform(-1, 1, shape) * 3.4e38,
    "forbidden": lambda rng, shape: np.where(rng.random(shape) < 0.7, -np.inf, rng.normal(size=shape)),
    "ascending": lambda rng, shape: np.broadcast_to(np.arange(shape[1]) * 0.01, shape),
    "infinite": lambda rng, shape: np.where(rng.random(shape) < 1 / shape[1], np.inf, rng.normal(size=shape)),
    "not a number": lambda rng, shape: np.where(rng.random(shape) < 1 / shape[1], np.nan, rng.normal(size=shape)),
}


pytestmark = pytest.mark.skipif(not real_isas(), reason="needs the operator library")


def batch(seed, vocab_size, kind, num_samples=6):
    """Logits of a kind, and a mixture of every parameter, extremes included."""
    rng = np.random.default_rng(seed)
    logits = LOGITS[kind](rng, (num_samples, vocab_size)).astype(np.float32)
    pick = lambda *values: rng.choice(values, num_samples)  # noqa: E731
    tokens = lambda: rng.integers(0, min(vocab_size, 50), rng.integers(0, 40)).tolist()  # noqa: E731
    bias = lambda: {int(rng.integers(vocab_size)): float(rng.choice([-np.inf, -100, 0.1, 100]))}  # noqa: E731
    allowed = lambda: np.unique(rng.integers(0, vocab_size, rng.integers(0, 80))).tolist()  # noqa: E731
    sampling = sampling_input(
        num_samples,
        temperature=pick(0, 1e-45, 0.01, 0.7, 1, 1, 100),
        top_k=pick(0, 0, 1, 2, 40, max(vocab_size - 1, 0), vocab_size, 2**31 - 1),
        top_p=pick(1, 1, 0.999999, 0.95, 0.5, 1e-30),
        min_p=pick(0, 0, 1e-9, 0.1, 1),
        typical_p=pick(1, 1, 1, 0.95, 0.2, 1e-30),
        repetition_penalty=pick(1, 1, 1.3, 0.01, 100),
        presence_penalty=pick(0, 0, 0.5, -2),
        frequency_penalty=pick(0, 0, 0.3, -2),
        seed=rng.integers(0, 2**64, num_samples, dtype=np.uint64),
        position=rng.integers(0, 2**31, num_samples),
        num_logprobs=pick(-1, -1, 0, 1, 5, 20, vocab_size if vocab_size < 100 else 3),
        history={row: tokens() for row in range(0, num_samples, 2)},
        history_prompt_lens=pick(0, 0, 5, 60),
        bias={row: bias() for row in range(0, num_samples, 3)},
        allowed={row: allowed() for row in range(0, num_samples, 4)},
    )
    check_sampling(sampling, vocab_size)
    return logits, sampling


def assert_equal_choices(ours, expected):
    for field in fields(sampling_reference.SampledTokens):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(expected, field.name), field.name)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from(VOCAB_SIZES), st.sampled_from(sorted(LOGITS)))
@example(0, 32_000, "tied")
@example(1, 32_000, "normal")
def test_sampler_equals_numpy_for_all_isas_and_threads(seed, vocab_size, kind):
    logits, sampling = batch(seed, vocab_size, kind)
    history = sampling.history_token_ids
    expected = sampling_reference.choose_tokens(logits, sampling, history)
    for isa in real_isas():
        for threads in (1, 2):
            with library.use_isa(isa), library.use_threads(threads):
                assert_equal_choices(LibrarySampler()(logits, sampling, history), expected)


@pytest.mark.parametrize("kind", sorted(LOGITS))
def test_sampled_tokens_of_each_kind_equal_numpy(isa, kind):
    """Every filter alone and in pairs, over many numbers."""
    row = LOGITS[kind](np.random.default_rng(5), (1, 300)).astype(np.float32)
    count = 64
    logits = np.repeat(row, count, axis=0)
    for parameters in (
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 7, "top_p": 0.8},
        {"typical_p": 0.5},
    ):
        sampling = sampling_input(count, temperature=0.9, position=np.arange(count), **parameters)
        expected = sampling_reference.choose_tokens(logits, sampling, NO_TOKENS)
        assert_equal_choices(LibrarySampler()(logits, sampling, NO_TOKENS), expected)


def test_sampler_is_batch_invariant(isa):
    logits, sampling = batch(3, 1000, "normal", num_samples=40)
    together = sample(0, logits, sampling, NO_TOKENS, LibrarySampler())
    for row in range(len(logits)):
        alone = sample(0, logits[row : row + 1], select_samples(sampling, [row]), NO_TOKENS, LibrarySampler())
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0].tobytes() == together.logprobs[row].tobytes()
        assert alone.top.of(0) == together.top.of(row)


def test_sampler_distinguishes_subnormal_logits():
    """The library's threads compute operators with subnormals as zero."""
    rows = np.repeat(np.array([[1e-44, 3e-44, 2e-44]], np.float32), 5_000, axis=0)
    with library.use_threads(2):
        assert (LibrarySampler()(rows, sampling_input(len(rows)), NO_TOKENS).token_ids == 1).all()


def test_sampler_random_numbers_equal_python():
    # Over equal logits the token tells the leading bits of the number.
    count, vocab_size = 50, 4096
    sampling = sampling_input(
        count,
        temperature=1,
        seed=np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64),
        position=np.arange(count),
    )
    chosen = LibrarySampler()(np.zeros((count, vocab_size), np.float32), sampling, NO_TOKENS).token_ids
    assert chosen.tolist() == np.floor(uniform(sampling.seed, sampling.position) * vocab_size).astype(int).tolist()


def test_sampler_accepts_strided_and_read_only_logits():
    logits = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32).T
    logits.flags.writeable = False
    assert LibrarySampler()(logits, sampling_input(8), NO_TOKENS).token_ids.tolist() == (logits.argmax(axis=1).tolist())


@pytest.mark.parametrize("backend", ["cpu", "ascend", "ascend_fast", "ascend_invariant"])
def test_sampler_library_is_used_unless_it_is_missing(backend, monkeypatch, caplog):
    assert choose_tokens_for("plain") is sampling_reference.choose_tokens
    assert isinstance(choose_tokens_for(backend), LibrarySampler)

    def missing():
        raise KernelError("no compiler")

    monkeypatch.setattr(library, "load", missing)
    assert choose_tokens_for(backend) is sampling_reference.choose_tokens
    assert "the operator library is missing, so NumPy samples the tokens, many times slower: no compiler" in caplog.text


def test_a_sampler_gives_the_same_tokens_in_every_order_of_calls():
    """Calls with other numbers of samples, log-probabilities and lists, as in the steps of a server."""
    choose, given = LibrarySampler(), [batch(seed, 300, "normal") for seed in range(12)]
    for logits, sampling in [*given, *given[::-1], *[each for each in given for _ in range(2)]]:
        history = sampling.history_token_ids
        assert_equal_choices(choose(logits, sampling, history), LibrarySampler()(logits, sampling, history))


def test_sampler_arguments_have_the_expected_lengths():
    assert ctypes.sizeof(sampler.SampleArgs) == library.load().llm_sample_args_size()
