"""How long a model may think before it answers: budgets in tokens, in the fields of several protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.sampling_params import Whole
from llm_serving.errors import RequestError
from llm_serving.server.schemas import ChatCompletionRequest

MAX_BUDGET: Final = 2**24
_BUDGETS: Final = ("thinking_token_budget", "thinking_budget", "max_thinking_tokens")
BUDGET: Final = Whole(0, MAX_BUDGET)
EFFORTS: Final = ("none", "minimal", "low", "medium", "high")


class ThoughtCounter:
    """Counts the tokens of what is thought, without the marks around it; how they come in pieces changes nothing.

    Args:
        opening: Id of the token that begins a thought.
        closing: Id of the one that ends it.
        is_open: Whether the prompt ends with the opening.
    """

    def __init__(self, opening: int | None, closing: int, *, is_open: bool) -> None:
        self._opening = opening
        self._closing = closing
        self._thinks = is_open
        self._has_thought = False
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        for token_id in token_ids:
            if self._thinks and token_id == self._closing:
                self._thinks, self._has_thought = False, True
            elif self._thinks:
                self.num_tokens += 1
            elif token_id == self._opening and not self._has_thought:
                self._thinks = True


class Budget(NamedTuple):
    """Tokens of a thought, behind which it ends."""

    field: str
    """That asks for it."""
    num_tokens: int


def asked_budget(request: ChatCompletionRequest, config: ServerConfig) -> Budget | None:
    """The budget that a request asks for; None: any number of tokens.

    Raises:
        RequestError: It asks for several, or for none of the right kind.
    """
    given = [name for name in (*_BUDGETS, "reasoning_effort") if getattr(request, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(given[1], f"must not be given together with `{given[0]}`")
    [field] = given
    if field == "reasoning_effort":
        return Budget(field, _of_effort(request.reasoning_effort, config))
    return Budget(field, BUDGET.checked(field, getattr(request, field)))


def _of_effort(effort: str | None, config: ServerConfig) -> int:
    budgets = {
        "none": 0,
        "minimal": 0,
        "low": config.low_effort_token_budget,
        "medium": config.medium_effort_token_budget,
        "high": config.high_effort_token_budget,
    }
    if effort not in budgets:
        raise RequestError("reasoning_effort", f"must be one of {', '.join(EFFORTS)}", effort)
    return budgets[effort]
