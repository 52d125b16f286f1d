"""What is noted of one HTTP request while it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import HTTPConnection

from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import HttpTimings

SCOPE_KEY: Final = "llm_serving.note"


@dataclass(eq=False, slots=True)
class RequestContext:
    """Begun by `Accounting` and filled on the way; it never holds a text of the request or the answer."""

    http_timings: HttpTimings
    method: str
    route: str
    """The path as the table of endpoints has it; "other" where it has none."""
    client: str = ""
    """Address of the client."""
    status: int | None = None
    """Of the answer, once it has begun."""
    error: str = ""
    """Kind of an error and, where a field was wrong, its name."""
    request_id: str = ""
    tenant: str = ""
    request_class: str = ""
    num_prompt_tokens: int = 0
    """Of all prompts."""
    streams_per_prompt: int = 1
    outputs: Sequence[RequestOutput | None] | None = None
    """The newest piece of each stream that answers, in the order of the prompts; None: nothing was generated."""

    @property
    def longest_answers(self) -> list[int]:
        """For each prompt the tokens of the longest answer to it, as far as it was told."""
        lens = [0 if output is None else output.num_output_tokens for output in self.outputs or ()]
        return [max(lens[i : i + self.streams_per_prompt]) for i in range(0, len(lens), self.streams_per_prompt)]


def request_context_of(connection: HTTPConnection) -> RequestContext | None:
    """The note of a request; None where nobody took one."""
    note = connection.scope.get(SCOPE_KEY)
    assert note is None or isinstance(note, RequestContext)
    return note
