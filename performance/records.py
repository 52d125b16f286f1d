"""What is kept of every request: raw timestamps and texts, from which everything else is computed."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Attempt:
    """One time that a request was sent.

    Attributes:
        sent_s: When.
        retry_after_s: After how many seconds it is to be sent again; None: it was not refused.
        predicted_s: Seconds to its first token that the server tells, counted from now and coming back included.
        request_id: By which the server can be asked about it; empty where it does not tell.
    """

    sent_s: float
    retry_after_s: float | None
    predicted_s: float | None
    request_id: str = ""


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it. All times are seconds from the start of the run.

    Attributes:
        due_s: When the arrival process wanted it sent; latencies count from here, so a late client or a retry is not
            hidden.
        sent_s: When the client got to it.
        end_s: When the response was complete, or had failed.
        token_times_s: Arrival of each token event; an event may carry several tokens.
        num_output_tokens: As the server counted them, or the number of events where it did not say.
        expected: The one right answer, None where there is none.
        error: Why it failed; None for an answered request.
        attempts: The times it was sent, of an answered request.
    """

    index: int
    prompt: str
    task: str
    expected: str | None
    due_s: float
    sent_s: float
    end_s: float
    token_times_s: tuple[float, ...] = ()
    num_output_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    num_retries: int = 0
    error: str | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def lateness_s(self) -> float:
        """By how much the load generator itself was late."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time to first token; the whole latency of an answer without one."""
        return (self.token_times_s[0] if self.token_times_s else self.end_s) - self.due_s

    @property
    def latency_s(self) -> float:
        """End to end."""
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1); None for fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive token events."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def exact(self) -> bool | None:
        """Whether the answer is the expected one but for white space around it; None where nothing is expected."""
        if self.expected is None:
            return None
        return self.ok and self.text.strip() == self.expected.strip()
