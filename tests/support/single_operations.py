"""Programs of single operations: the embedding table holds the input, and the LM head is the identity."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value, Weight
from support.decoder_calls import Step
from support.kernel_calls import Typed, typed
from support.program_calls import Runnable, run, runnable_of

Body = Callable[[Network, Value], Value]


def program_with(x: Typed, width: int, body: Body, arrays: dict[str, Any] | None = None) -> Runnable:
    """Return a program whose result is body(x), with `width` columns. `arrays`: first name of a weight -> values."""
    net = Network(x.array.shape[1], len(x.array), 1e-5)
    y = body(net, net.embedding("x"))
    net.lm_head(y, "one")
    given = {"x.weight": x.values, "one.weight": np.eye(width), **(arrays or {})}
    values: dict[Weight, Any] = {weight: given[weight.names[0]] for weight in net.weights}
    with library.use_isa("plain"):  # this instruction set does not repack weights
        return runnable_of(net, values, x.dtype)


def step_of_rows(count: int, tables: list[list[int]] | None = None, query_lens: list[int] | None = None) -> Step:
    tables, query_lens = tables or [[0]], query_lens or [count]
    return Step(list(range(count)), [0] * count, [-1] * count, tables, query_lens, query_lens, list(range(count)))


def result_of(x: Typed, width: int, body: Body, arrays: dict[str, Any] | None = None) -> Typed:
    return run(program_with(x, width, body, arrays), step_of_rows(len(x.array)), [])


def random(count: int, width: int, dtype: str, seed: int = 1) -> Typed:
    return typed(np.random.default_rng(seed).standard_normal((count, width)), dtype)
