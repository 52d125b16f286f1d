"""One prompt and what is generated for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_serving.core.constraint import Constraint, ConstraintMatcher
from llm_serving.core.kv_transfer import Transfer
from llm_serving.core.request_class import STANDARD, RequestClass, cache_namespace
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.core.timings import HttpTimings

if TYPE_CHECKING:
    from llm_serving.core.request_output import OutputSink


class RequestStatus(enum.Enum):
    """Where a request is in its life.

    WAITING -> RUNNING -> FINISHED
       ^          |
       +----------+  preempted: its blocks were taken, it waits to be computed again
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
    """Its deadline passed, or could not be met any more."""
    UNAVAILABLE = "unavailable"
    """Nothing could compute it any more; it may be asked again."""


RUNNING: Final = RequestStatus.RUNNING
FINISHED: Final = RequestStatus.FINISHED
"""By names of their own: in Python 3.11 to look a member up in its class takes five times as long as to compare it."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """The master's state of one request; owned by the engine loop once submitted.

    One rule moves it forward: a step computes tokens until `num_computed_tokens` reaches `num_tokens`; when it gets
    there, the step samples the next token. Scheduling runs ahead of the device, so tokens may be sampled whose ids are
    not known here yet: `num_tokens_in_flight` counts them.

        |<------- prompt ------->|<-- known output -->|<- in flight ->|
        |<------------- num_tokens_known ------------>|               |
        |<--------------------- num_tokens -------------------------->|
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the output: the request's own and, unless `ignore_eos`, the model's."""
    priority: int = 0
    """Smaller runs first; it also puts the request into its class."""
    tenant: str = ""
    """Who shares fairly with others of the same class: the name of an API key, or the user a client names."""
    cache_salt: str = ""
    """Requests find each other's computed prefixes only where tenant and salt are the same."""
    fork_of: str | None = None
    """Id of a request with the same beginning; this one waits until that has computed it, and shares its blocks."""
    needs_known_output: bool = False
    """Whether its next step depends on more than the token of its last one, so that it cannot be scheduled ahead."""
    num_prompt_logprobs_wanted: int = 0
    """Tokens at the beginning of its prompt behind which log-probabilities are wanted: all but the last, or none."""
    wants_vector: bool = False
    """Whether the last hidden state of its prompt is wanted."""
    wants_migration: bool = False
    """Whether another replica goes on with it once its prompt is computed and there is room to hand its blocks over."""
    transfer: Transfer | None = None
    """What it has come with, where another replica has begun with it."""
    is_beam: bool = False
    """Whether it waits for others between two of its tokens."""
    beam_search: BeamSearchParams | None = None
    """What the answer is where not just the tokens of this request; `engine.receivers` has a receiver for each type."""
    constraint: Constraint | None = None
    """What has been made of that of its sampling."""
    matcher: ConstraintMatcher | None = None
    """Tells which tokens may follow its output, where it has a constraint."""
    sink: OutputSink | None = None
    """What it is computed for; given when an engine takes it."""
    arrival_time: float = 0.0
    """Seconds on the engine's clock."""
    deadline: float | None = None
    """When it is of no more use to who asked, on the same clock; None: never."""
    http_timings: HttpTimings | None = None
    """The HTTP request it answers, alone or with others."""
    sequence: int = 0
    """Order of arrival at the scheduler; breaks ties, so that no two requests are equal."""
    class_sequence: int = 0
    """Order in which it came into its class, by the numbers of `sequence`."""
    class_entry_step: int = 0
    """The step before which it came into its class."""
    request_class: RequestClass = STANDARD
    """Given by the scheduler, from `priority`."""
    queue_key: tuple[int, float, int, int] = (0, 0.0, 0, 0)
    """Place in every order the scheduler keeps, smaller first: rank of the class, place by the order of the policy,
    step of arrival moved by `priority`, `sequence`. Given on arrival, and again with another priority."""

    status: RequestStatus = RequestStatus.WAITING
    is_migrating: bool = False
    """Whether its blocks are being handed over: no further step computes it here."""
    paused: bool = False
    """Whether what follows its last reply has not been decided: it is not scheduled, and gives way to anybody."""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache once every submitted step has run."""
    num_confirmed_tokens: int = 0
    """Those of them whose step has been replied to."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found computed when the request first ran."""
    num_prompt_logprobs_received: int = 0
    """Those of `num_results_wanted`, from the first on, whose log-probabilities have come."""
    num_tokens_in_flight: int = 0
    """Tokens sampled by submitted steps whose ids have not come back."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Draft tokens after the newest token. The step that computes the newest token may verify some of them; until its
    reply they stay, and the request is not scheduled again."""
    num_new_tokens: int = 0
    """Tokens that its newest reply has brought."""
    num_preemptions: int = 0
    num_lost_steps: int = 0
    """Steps that computed it and were never replied to with a result, since it last got further than ever before."""
    num_tokens_at_loss: int = 0
    """Where it has got further: when more of its tokens are computed than these, one less than such a step reached."""
    arrival_clock: int = 0
    """What the clock of its class showed when it came; that clock counts the steps its class could take part in."""
    wait_bound: int | None = None
    """Most steps from its arrival to its first admission, given on arrival; None: nothing is promised.

    To a fork it is given, and counts from then, when the prompt it waits for is computed. It is given anew, and counts
    from then, when its tenant's limit no longer holds it apart, and when the cache is lost while it waits: what runs
    then is to be admitted again before it."""
    num_steps_waited: int | None = None
    """Those of `wait_bound` that were counted until it was admitted first; None: it has not been."""
    admission_number: int = 0
    """Order of admission, the latest time: prompts that have begun go on in this order."""
    running_since: tuple[int, float] = (0, 0.0)
    """The step, and seconds on the engine's clock, in which it was admitted the latest time."""
    last_scheduled_step: int = -1
    """The newest step that computed a token of this request, or the one before it was admitted."""
    class_change_step: int = -1
    """The step before which it came into its class while it ran; -1: it did not."""
    first_scheduled_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the output, if one did."""

    def __post_init__(self) -> None:
        self.needs_known_output = self.needs_known_output or self.sampling.needs_known_output
        assert (self.constraint is None) == (self.sampling.constraint is None), "a constraint must be compiled"
        if self.constraint is not None:
            self.matcher = self.constraint.create_matcher()
        if self.sampling.prompt_logprobs is not None:
            self.num_prompt_logprobs_wanted = len(self.prompt_token_ids) - 1

    @property
    def root_request(self) -> Request:
        """The request that it is computed for: itself, or the one whose beam it is."""
        return self if self.sink is None else self.sink.request

    @property
    def cache_namespace(self) -> str:
        return cache_namespace(self.tenant, self.cache_salt)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, those in flight included."""
        return len(self.output_token_ids) + self.num_tokens_in_flight

    @property
    def num_tokens_known(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_tokens_known + self.num_tokens_in_flight

    @property
    def max_num_tokens(self) -> int:
        """Most tokens it can ever have."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_prompt_results(self) -> bool:
        """Whether anything but a token comes of it, or nothing at all but that its prompt is computed."""
        return self.num_prompt_logprobs_wanted > 0 or self.wants_vector or self.sampling.max_tokens == 0

    @property
    def max_prefix_hit_tokens(self) -> int:
        """Most tokens at its beginning that need not be computed for it, if others have computed them.

        What gives a result is computed for it; so a token is taken from others only if its results have come.
        """
        return (
            self.num_prompt_logprobs_received
            if self.num_prompt_logprobs_received < self.num_prompt_logprobs_wanted
            else self.num_tokens_known - 1
        )

    @property
    def is_decoding(self) -> bool:
        """Whether just the newest token is left to compute."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    @property
    def has_run(self) -> bool:
        """Whether it has been admitted before, or begins as a beam where one that has been was."""
        return self.num_steps_waited is not None or self.last_scheduled_step >= 0

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED

    def known_token_ids(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and known output."""
        split = len(self.prompt_token_ids)
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]
