"""Figures of an in-process benchmark, its random prompts, and a stopwatch for parts of the engine."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llm_serving.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm_serving.offline import LLM

FIRST_PLAIN_TOKEN = 259


@dataclass(frozen=True)
class Figure:
    """One measured number; `limit` is the best possible value, in the same unit."""

    test: str
    quantity: str
    value: float
    unit: str
    limit: float | None = None
    less_is_better: bool = False

    @property
    def share(self) -> float | None:
        """Share of the limit that is reached, 0 to 1."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.less_is_better else self.value / self.limit

    def __str__(self) -> str:
        share = f"  {self.share:.0%} of {self.limit:,.1f}" if self.share is not None else ""
        return f"{self.test:4} {self.quantity:36} {self.value:12,.1f} {self.unit}{share}"


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[str | list[int]]:
    """Return random prompts that share no prefix, so that the prefix cache has no hits."""
    rng = np.random.default_rng([seed, count, length])
    low = min(FIRST_PLAIN_TOKEN, llm.model_spec.vocab_size // 2)
    return list(rng.integers(low, llm.model_spec.vocab_size, (count, length)).tolist())


def greedy(max_tokens: int) -> SamplingParams:
    """Return greedy parameters for exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Stopwatch:
    """Seconds spent in chosen functions, each without the chosen functions that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._not_called: set[str] = set()

    @contextmanager
    def on(self, *functions: tuple[Any, str, str]) -> Iterator[None]:
        """Time the function `owner.attribute` under `name`, for each (owner, attribute, name).

        Raises:
            AttributeError: An owner has no such attribute.
            RuntimeError: No function of a name was called, so that its time would be missing.
        """
        self._not_called = {name for _, _, name in functions}
        before = [(owner, attribute, vars(owner).get(attribute)) for owner, attribute, _ in functions]
        for owner, attribute, name in functions:
            setattr(owner, attribute, self._timed(getattr(owner, attribute), name))
        try:
            yield
        finally:
            for owner, attribute, own in before:
                if own is None:
                    delattr(owner, attribute)  # the attribute was the class's
                else:
                    setattr(owner, attribute, own)
        if self._not_called:
            raise RuntimeError(f"nothing was called of what is to be timed as {', '.join(sorted(self._not_called))}")

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._not_called.discard(name)
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[name] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return timed
