"""What a benchmark of the engine asks and answers: random prompts, and figures beside their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llm_serving.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm_serving.offline import LLM

FIRST_PLAIN_TOKEN = 259


@dataclass(frozen=True)
class Figure:
    """One measured number; `limit` is the best it could be, in the same unit."""

    test: str
    quantity: str
    value: float
    unit: str
    limit: float | None = None
    less_is_better: bool = False

    @property
    def share(self) -> float | None:
        """How much of the limit is reached; 1.0 is all of it."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.less_is_better else self.value / self.limit

    def __str__(self) -> str:
        share = f"  {self.share:.0%} of {self.limit:,.1f}" if self.share is not None else ""
        return f"{self.test:4} {self.quantity:36} {self.value:12,.1f} {self.unit}{share}"


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[str | list[int]]:
    """All different, so that a prefix cache finds nothing."""
    rng = np.random.default_rng([seed, count, length])
    low = min(FIRST_PLAIN_TOKEN, llm.model_spec.vocab_size // 2)
    return list(rng.integers(low, llm.model_spec.vocab_size, (count, length)).tolist())


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
