"""Who asks for what and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_serving.core.request_class import RequestClass


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load."""

    stream: str
    """Name of whom it belongs to."""
    due_s: float
    """From the beginning of the load; in a closed loop, when its stream begins."""
    prompt_token_ids: list[int]
    num_output_tokens: int
    """After so many the model ends its answer, unless it asked for fewer."""
    max_tokens: int
    ignore_eos: bool = False
    """Whether it is known to everybody that it gets as many as it asks for."""
    priority: int | None = None
    class_name: str | None = None
    """In place of a priority, where the configuration has the class."""
    tenant: str = ""
    timeout_s: float | None = None
    """After which the answer is of no more use."""
    cache_salt: str = ""
    """Requests find what was computed for others only where tenant and salt are the same."""
    answer_token_ids: Sequence[int] = ()
    """Its answer as far as it is known; only known tokens can be drafted."""

    def priority_in(self, classes: Sequence[RequestClass]) -> int:
        """Its priority; that of its class, where it names one.

        Raises:
            KeyError: There is no such class.
        """
        if self.class_name is None:
            return self.priority or 0
        return {each.name: each.rank for each in classes}[self.class_name]


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests that come in one way, in the order in which they come."""

    name: str
    requests: Sequence[Asked]
    concurrency: int | None = None
    """Clients that each ask for the next one when they have been answered; None: requests come when they are due."""
    class_where: str = ""
    """File, line and key of the class that it names."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    streams: tuple[Stream, ...]
    retries: int = 0
    """Times that a refused request comes again when it was told to."""
    vocab_size: int = 32000
    """Its token ids lie below."""
    notices: tuple[str, ...] = ()
    """What a person should know of it."""

    @property
    def num_requests(self) -> int:
        return sum(len(stream.requests) for stream in self.streams)

    @property
    def has_texts(self) -> bool:
        """Whether any of its answers is known, so that drafts can be simulated."""
        return any(each.answer_token_ids for stream in self.streams for each in stream.requests)

    def faster(self, factor: float) -> Load:
        """The same requests, coming so many times faster; closed loops stay what they are."""
        streams = tuple(
            stream
            if stream.concurrency is not None
            else replace(stream, requests=[replace(each, due_s=each.due_s / factor) for each in stream.requests])
            for stream in self.streams
        )
        return replace(self, name=f"{self.name} x {factor:.3g}", streams=streams)
