"""One request in the master: what the client requested, and the state of the request in scheduler and engine.

Three slotted dataclasses extend one another:

| Class            | Written by                                                                        |
| ---------------- | --------------------------------------------------------------------------------- |
| ClientRequest    | no code after construction: its fields are `Final`, which mypy checks             |
| ScheduledRequest | the scheduler; the engine sets the initial values before it calls `Scheduler.add` |
| Request          | the engine, in its own thread                                                     |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from llm_serving.core.request_class import STANDARD, RequestClass
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.core.step import Int32Array
from llm_serving.core.timings import HttpTimings

if TYPE_CHECKING:
    from llm_serving.core.request_output import OutputSink


class ConstraintMatcher(Protocol):
    """Determines which tokens a constraint allows in one output. Only one thread may use it at a time."""

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        """Return the bit mask (`AllowedTokens.words`) of the tokens that may follow the output. If the output extends
        that of the previous call, only the new tokens are processed. End tokens are allowed only if the constraint is
        satisfied. If the matcher fails, no bit is set.
        """

    def allowed_words_after_drafts(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
    ) -> list[Int32Array]: ...

    def constrain_draft(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens: the draft before its first forbidden token, then those the constraint forces."""


class Constraint(Protocol):
    """A compiled constraint (structured output). It is immutable, so requests may share it."""

    def create_matcher(self) -> ConstraintMatcher: ...


class DiskPrefix(NamedTuple):
    """The part of a request's prompt that is in the disk cache: the first `num_stored` blocks of the prompt."""

    num_stored: int
    start: int = 0
    """Index, in the prompt, of the block that `blocks` begins with."""
    blocks: tuple[tuple[int, int], ...] = ()
    """(block id, epoch) of the blocks that were read from disk into the transfer pool, in token order."""


@dataclass(frozen=True)
class Transfer:
    """What a migrating request takes to its next replica: its KV blocks, in the transfer pool, and its counters.

    The next replica frees the blocks. Until then, their content does not change. If there are no blocks, the next
    replica recomputes all tokens.
    """

    block_ids: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    start: int = 0
    """Number of blocks that are not transferred, because later tokens do not attend to them."""
    num_tokens: int = 0
    num_waited: int = 0
    num_preemptions: int = 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return list(zip(self.block_ids, self.epochs, strict=True))

    def without_blocks(self) -> Transfer:
        return replace(self, block_ids=(), epochs=(), start=0, num_tokens=0)


class RequestStatus(enum.Enum):
    """State of a request in the scheduler.

    WAITING -> RUNNING -> FINISHED
       ^          |
       +----------+  preempted: it waits until its blocks are swapped in or recomputed
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """No WorkAgent could compute the request. The client may send it again."""


RUNNING: Final = RequestStatus.RUNNING
FINISHED: Final = RequestStatus.FINISHED
"""A constant, because looking up an enum member takes five times as long as comparing it in Python 3.11."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class ClientRequest:
    """The client's request. No field changes after construction."""

    request_id: Final[str]
    prompt_token_ids: Final[list[int]]
    sampling: Final[SamplingParams]
    stop_token_ids: Final[frozenset[int]] = frozenset()
    """Token ids that end the output: the request's own and, unless `ignore_eos`, the model's."""
    tenant: Final[str] = ""
    """Name of the API key, or the user that the client names. Tenants share a class fairly."""
    cache_salt: Final[str] = ""
    adapter: Final[int] = 0
    """Number of the adapter that computes the answer, or 0 for no adapter."""
    fork_of: Final[str | None] = None
    """Id of the parent, a request with the same prefix. This request waits until the parent's prompt is computed."""
    wants_vector: Final[bool] = False
    beam_search: Final[BeamSearchParams | None] = None
    constraint: Final[Constraint | None] = None
    arrival_time: Final[float] = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(eq=False, slots=True)
class ScheduledRequest(ClientRequest):
    """The scheduler's state of a request.

    Steps compute tokens until `num_computed_tokens` reaches `num_tokens`; then a step samples the next token. A sampled
    token is in flight until the scheduler, which forms steps before earlier ones have ended, receives its id.

        |<------- prompt ------->|<-- known output -->|<- in flight ->|
        |<------------- num_tokens_known ------------>|               |
        |<--------------------- num_tokens -------------------------->|
    """

    # Progress
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Number of tokens whose keys and values are in the cache once all submitted steps have run."""
    num_confirmed_tokens: int = 0
    """Number of tokens that steps with a reply have computed."""
    num_tokens_in_flight: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    """Draft tokens after the latest token. No other step computes the request until one has verified them."""
    num_prompt_logprobs_wanted: int = 0
    num_prompt_logprobs_received: int = 0
    """Number of prompt tokens, counted from the first, whose following token already has a log-probability."""
    needs_known_output: bool = False
    """Whether each step needs the ids of all earlier tokens, so that it is formed only after the latest reply."""
    is_beam: bool = False
    paused: bool = False
    """Whether the request waits for its beam search. It is not scheduled, and is preempted first."""

    # Order
    priority: int = 0
    deadline: float | None = None
    """Time in seconds, on the engine's clock, after which the client does not need the answer."""
    request_class: RequestClass = STANDARD
    sequence: int = 0
    """Number of the request in order of arrival at the scheduler."""
    queue_key: tuple[int, float, int, int] = (0, 0.0, 0, 0)
    """Sort key, see `scheduler.queues.Key`."""
    class_sequence: int = 0
    """Number of the request in order of arrival in its class. It is comparable with `sequence`."""
    class_entry_step: int = 0
    class_change_step: int = -1

    # Waits and preemptions
    arrival_clock: int = 0
    """Value of the class's clock at the arrival. The clock counts the steps that could have scheduled the class."""
    wait_bound: int | None = None
    num_steps_waited: int | None = None
    admission_number: int = 0
    """Sequence number of the latest admission. Prefills continue in this order."""
    running_since: tuple[int, float] = (0, 0.0)
    """(step number, time in seconds on the engine's clock) of the latest admission."""
    first_scheduled_time: float | None = None
    last_scheduled_step: int = -1
    """Number of the latest step that computed a token; after an admission, of the step before the admission."""
    num_preemptions: int = 0

    # Migration
    wants_migration: bool = False
    """Whether the request migrates to another replica once its prompt is computed."""
    is_migrating: bool = False
    """Whether the blocks of the request are being exported. No further step of this replica computes the request."""
    transfer: Transfer | None = None
    disk_prefix: DiskPrefix | None = None

    # End
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def has_prompt_results(self) -> bool:
        """Whether the prompt itself gives a result (log-probabilities or a vector), or its end finishes the request."""
        return self.num_prompt_logprobs_wanted > 0 or self.wants_vector or self.sampling.max_tokens == 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids) + self.num_tokens_in_flight

    @property
    def num_tokens_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_tokens_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def max_prefix_hit_tokens(self) -> int:
        """Maximum length of a shared prefix. Tokens that must give a result are computed for the request itself."""
        received = self.num_prompt_logprobs_received
        return received if received < self.num_prompt_logprobs_wanted else self.num_tokens_known - 1

    @property
    def is_decoding(self) -> bool:
        """Whether the latest token is the only one that remains to be computed."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    @property
    def has_run(self) -> bool:
        """Whether the request was admitted before. A beam that continues an admitted beam counts as admitted."""
        return self.num_steps_waited is not None or self.last_scheduled_step >= 0

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED

    def known_token_ids(self, start: int, end: int) -> list[int]:
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]


@dataclass(eq=False, slots=True)
class Request(ScheduledRequest):
    sink: OutputSink | None = None
    matcher: ConstraintMatcher | None = None
    http_timings: HttpTimings | None = None
    num_lost_steps: int = 0
    """Number of failed steps with this request since it last computed more than `num_tokens_at_loss` tokens."""
    num_tokens_at_loss: int = 0

    def __post_init__(self) -> None:
        if self.sampling.bad_words:
            self.needs_known_output = self.needs_known_output or self.sampling.needs_known_output
        assert (self.constraint is None) == (self.sampling.constraint is None), "a constraint must be compiled"
        if self.constraint is not None:
            self.matcher = self.constraint.create_matcher()
        if self.sampling.prompt_logprobs is not None:
            self.num_prompt_logprobs_wanted = len(self.prompt_token_ids) - 1

    @classmethod
    def derived(cls, request: ClientRequest, **changes: Any) -> Request:
        """Return a new request with the `ClientRequest` fields of `request`, no parent, and the values in `changes`."""
        values = {each.name: getattr(request, each.name) for each in fields(ClientRequest)}
        return cls(**{**values, "fork_of": None, **changes})

    @property
    def root_request(self) -> Request:
        """The request that the client sent: this one or, for a beam, the request of the beam search."""
        return self if self.sink is None else self.sink.request
