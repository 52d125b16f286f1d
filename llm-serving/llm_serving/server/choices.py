"""How many answers a request asks for, and how they are found: sampled, the best of several, or by beam search."""

from __future__ import annotations

from typing import Final, NamedTuple

from llm_serving.core.sampling_params import DEFAULTS, BeamSearchParams, Whole
from llm_serving.errors import RequestError
from llm_serving.server.schemas import GenerationRequest

MAX_N: Final = 128
MAX_CHOICES: Final = 512
"""Most sequences generated for one HTTP request: prompts times `best_of`."""
COUNT: Final = Whole(1, MAX_N)
_NEUTRAL: Final = {
    "temperature": 0.0,
    **{name: DEFAULTS[name] for name in ("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")},
}
"""Values that beam search takes besides none: it compares the model's own log-probabilities."""


class Choices(NamedTuple):
    n: int = 1
    """Answers to each prompt."""
    best_of: int = 1
    """Sequences generated for each prompt, from which the answers are taken; at least `n`."""
    beams: BeamSearchParams | None = None
    """Of a beam search, whose width is `best_of`."""

    @property
    def counted_by(self) -> str:
        """The field that asks for so many sequences."""
        return "best_of" if self.best_of > self.n else "n"


ONE_ANSWER: Final = Choices()


def choices_of(request: GenerationRequest, num_prompts: int) -> Choices:
    """What the request asks for.

    Raises:
        RequestError: Too much of it, or together with what it does not go with.
    """
    n = 1 if request.n is None else request.n
    best_of = n if request.best_of is None else request.best_of
    for name, value in (("n", n), ("best_of", best_of)):
        COUNT.checked(name, value)
        if num_prompts * value > MAX_CHOICES:
            rule = f"times the number of prompts must be at most {MAX_CHOICES}"
            raise RequestError(name, rule, num_prompts * value)
    if best_of < n:
        raise RequestError("best_of", f"must be at least n, which is {n}", best_of)
    if request.use_beam_search:
        return Choices(n, best_of, _beam_search(request, n, best_of))
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        value = getattr(request, name)
        if value not in (None, neutral):
            raise RequestError(name, "must be given with use_beam_search: true only", value)
    if request.stream and best_of > n:
        raise RequestError("best_of", f"must be n, which is {n}, with stream: true", best_of)
    return Choices(n, best_of)


def _beam_search(request: GenerationRequest, n: int, width: int) -> BeamSearchParams:
    if request.stream:
        raise RequestError("stream", "must be false with use_beam_search", True)
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        if value not in (None, neutral):
            raise RequestError(name, f"must be {neutral:g} with use_beam_search", value)
    for name in ("stop", "logit_bias", "bad_words", "allowed_token_ids"):
        if getattr(request, name):
            raise RequestError(name, "is not supported with use_beam_search")
    return BeamSearchParams(
        width=width,
        num_returned=n,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=bool(request.early_stopping),
    )
