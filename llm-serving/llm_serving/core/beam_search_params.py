"""How a beam search goes on and when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llm_serving.core.parameter_rules import Real
from llm_serving.core.sampling_params import MAX_LOGPROBS
from llm_serving.errors import RequestError

MAX_BEAM_WIDTH: Final = MAX_LOGPROBS // 2
"""Every beam needs twice as many of its most likely tokens."""
LENGTH_PENALTY: Final = Real(-10.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What makes a request a beam search; checked on construction.

    Raises:
        RequestError: A field is outside its range; names field, rule and value.
    """

    width: int
    """Beams that go on after each step, and finished sequences that are kept; 1 to 10."""
    num_returned: int = 1
    """Of the finished sequences, the best so many are the answer; 1 to `width`."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by its number of generated tokens to this power: 0 compares
    sums, 1 means, more prefers longer ones. -10 to 10."""
    early_stopping: bool = False
    """End as soon as `width` sequences have finished, even if one that has not could still be better."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            raise RequestError("best_of", f"must be from 1 to {MAX_BEAM_WIDTH} with use_beam_search", self.width)
        if not 1 <= self.num_returned <= self.width:
            raise RequestError("n", f"must be from 1 to {self.width}, the width of the beam search", self.num_returned)
        object.__setattr__(self, "length_penalty", LENGTH_PENALTY.checked("length_penalty", self.length_penalty))
