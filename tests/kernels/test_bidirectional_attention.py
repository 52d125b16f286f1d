"""Bidirectional attention in programs: a softmax over all visible tokens that depends on the request alone."""

import functools

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from support.decoder_calls import Step
from support.kernel_calls import ROUNDING_UNIT, Array, Typed, assert_close, typed
from support.kernels_cache import SCALE
from support.program_calls import BLOCK_SIZE, Runnable, create_caches, run, runnable_of

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def attention_of(x: Typed, window: int) -> Runnable:
    """Return bidirectional attention, in which rows of x are queries, keys and values."""
    net = Network(WIDTH, len(x.array), causal=False)
    q, k, v = net.split(net.embedding("x"), *(heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS)))
    net.lm_head(net.attention(q, net.store_kv(k, v, KV_HEADS), scale=SCALE, window=window), "one")
    given = {"x.weight": x.values, "one.weight": np.eye(HEADS * HEAD_DIM)}
    with library.use_isa("plain"):  # which keeps weights as they are
        return runnable_of(net, {each: given[each.names[0]] for each in net.weights}, x.dtype)


def answers(x: Typed, window: int, prompts: list[range]) -> list[Array]:
    """Return the attention output of each prompt. One step computes all; their blocks are in descending order."""
    runnable = attention_of(x, window)
    lens = [len(prompt) for prompt in prompts]
    numbers = iter(range(sum(-(-count // BLOCK_SIZE) for count in lens) - 1, -1, -1))
    tables = [[next(numbers) for _ in range(-(-count // BLOCK_SIZE))] for count in lens]
    slots = [
        table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE
        for table, n in zip(tables, lens, strict=True)
        for i in range(n)
    ]
    token_ids = [each for prompt in prompts for each in prompt]
    positions = [i for n in lens for i in range(n)]
    step = Step(token_ids, positions, slots, tables, lens, lens, list(range(len(token_ids))))
    caches = create_caches(runnable, sum(map(len, tables)))
    for cache in caches:  # nothing behind a prompt may be read
        for part in (cache.key, cache.value):
            part.array[...] = np.array(np.nan, np.float32) if part.dtype == "float32" else 0x7FC0
    y = run(runnable, step, caches)
    return np.split(y.array, np.cumsum(lens)[:-1])


@functools.cache
def drawn(count: int, dtype: str) -> Typed:
    return typed(np.random.default_rng(count).standard_normal((count, WIDTH)), dtype)


@functools.cache  # all instruction sets have the same
def expected(count: int, dtype: str, window: int) -> tuple[Array, Array]:
    """Return the expected output for `drawn` rows, and the same with |v| in place of v, from which the tolerance
    follows.
    """
    x = drawn(count, dtype)
    q, k, v = np.split(x.values.astype(np.float64), np.cumsum([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]), axis=1)
    q = q.reshape(len(q), KV_HEADS, -1, HEAD_DIM)
    k, v = (part.reshape(len(q), KV_HEADS, HEAD_DIM) for part in (k, v))
    distance = np.abs(np.subtract.outer(np.arange(len(q)), np.arange(len(q))))
    scores = np.einsum("ihgd,jhd->hgij", q, k, optimize=True) * SCALE
    scores = np.where(distance < (window or len(q)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y, magnitude = (np.einsum("hgij,jhd->ihgd", weights, part, optimize=True) for part in (v, np.abs(v)))
    return y.reshape(len(q), -1), magnitude.reshape(len(q), -1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 1, 65])
def test_bidirectional_attention_equals_a_softmax_of_all_visible_tokens(isa: str, dtype: str, window: int) -> None:
    """1100 tokens have two segments."""
    for count in (1, 70, 1100):
        (y,) = answers(drawn(count, dtype), window, [range(count)])
        unit = 2e-6 if dtype == "float32" else 3 * ROUNDING_UNIT[dtype]
        rows, magnitude = expected(count, dtype, window)
        assert_close(Typed(y, "float32"), rows, unit * magnitude + 1e-6)


@pytest.mark.parametrize(("dtype", "window"), [("float32", 0), ("bfloat16", 9), ("float16", 0)])
def test_bidirectional_attention_is_batch_invariant(isa: str, dtype: str, window: int) -> None:
    x = typed(np.random.default_rng(1).standard_normal((1500, WIDTH)), dtype)
    prompts = [range(1200), range(1200, 1203), range(1203, 1400), range(1400, 1500)]
    together = answers(x, window, prompts)
    for prompt, y in zip(prompts, together, strict=True):
        assert np.array_equal(answers(x, window, [prompt])[0], y)
        assert np.isfinite(y).all()


def test_encoder_layers_share_one_cache() -> None:
    net = Network(WIDTH, 10, causal=False)
    for _ in range(3):
        q, k, v = net.split(net.embedding("x"), *(heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS)))
        net.attention(q, net.store_kv(k, v, KV_HEADS), scale=1.0)
    assert len(net.caches) == 1
