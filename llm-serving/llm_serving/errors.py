"""Exceptions that the package raises on purpose.

```
LLMServingError
├── ConfigError                 the YAML, an override or a model folder is invalid
│   └── ModelError              a model folder is missing, unreadable or of an unknown family
│       └── NotFiniteError      a weight has an infinite or NaN element
├── AuthenticationError   401   the API key is missing or unknown
├── RequestError          400   a request breaks a rule: field, rule, value
│   ├── ContextLengthError 400  prompt and max_tokens do not fit the model or the KV cache
│   ├── PermissionDeniedError 403  the API key does not permit the request
│   ├── RequestNotFoundError 404  the id is unknown, or belongs to another tenant
│   ├── ModelNotFoundError 404  the request names a model that is not served
│   ├── RequestTooLargeError 413
│   ├── RequestTimeoutError  408  the body did not arrive in time
│   └── IdempotencyError    422  the Idempotency-Key or the event id belongs to a different request
├── GoneError             410   the stream or response to continue no longer exists
├── RequestCancelledError 409   the request was cancelled, in a protocol without a finish reason for that
├── TimedOutError         504   the request's deadline has passed or cannot be met
├── CapacityError         429   the waiting queue is full; retry_after in seconds
│   ├── TooLateError      429   the predicted first token is later than the request's deadline
│   ├── StoreFullError    429   a store has no room for the request's data
│   └── RateLimitError    429   the limit per minute of the API key or the client address is exceeded
├── UnavailableError      503   loading, draining, or no WorkAgent is alive
├── NoWorkAgentsError           every WorkAgent has exhausted its restarts, and the server must exit
├── WorkerError           500   a WorkAgent failed on a step
│   ├── WorkerDiedError         the WorkAgent's process exited, or its channel broke
│   ├── RankLostError           another rank of the replica ended or runs a different step
│   └── StepMismatchError       a reply does not match the step in flight
├── ReceiptError                the verifiable record of a response is malformed
├── RecordingError              a recording of the scheduler is damaged or cannot be replayed
├── KernelError                 the operator library cannot be built or loaded, or has too little memory
└── TransportError              a channel between master and WorkAgent failed
    ├── ProtocolError           a frame is malformed, too long or of a different version
    ├── ChannelClosedError      the peer has closed the channel
    └── DeadlineExceededError   the peer did not reply in time
```

`http_status` is the status of the response when the error ends a request.
"""

import reprlib
from collections.abc import Mapping
from typing import ClassVar, Self

_short = reprlib.Repr()
_short.maxstring = 60
_short.maxother = 60
_short.maxlist = _short.maxtuple = _short.maxdict = 4


def shorten(value: object) -> str:
    """Return the `repr` of a value for an error text, shortened because a client's input may have megabytes."""
    try:
        return _short.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return f"<{type(value).__name__}>"


class LLMServingError(Exception):
    """Base class of all errors of this package."""

    http_status: ClassVar[int] = 500


class ConfigError(LLMServingError):
    """The configuration cannot be used. The message names file, line, key, rule and value, as far as they exist."""


class ModelError(ConfigError):
    """A model folder is missing, unreadable or of an unknown family."""


class NotFiniteError(ModelError):
    """A weight has an infinite or NaN element."""


class AuthenticationError(LLMServingError):
    """The request's API key is missing or unknown."""

    http_status: ClassVar[int] = 401


class RequestError(LLMServingError):
    """A request is invalid: a field breaks a rule.

    Args:
        field: Name of the field as the client wrote it.
        rule: The rule, as a text that follows the name: "must be >= 1".
        value: The given value, which the message shows shortened. Omit it if it would repeat a client's text.
    """

    http_status: ClassVar[int] = 400

    def __init__(self, field: str, rule: str, value: object = ...) -> None:
        given = "" if value is ... else f". Given: {shorten(value)}"
        super().__init__(f"`{field}` {rule}{given}")
        self.field = field
        self.rule = rule
        self.value = None if value is ... else value
        self._given = value

    def renamed(self, field: str, value: object = ...) -> Self:
        """Return the same error with a new field name and, if given, a new value."""
        return type(self)(field, self.rule, self._given if value is ... else value)

    def renamed_by(self, names: Mapping[str, str]) -> Self:
        """Return the same error with the protocol's name of its field. `names` maps internal to protocol names."""
        return self.renamed(names[self.field]) if self.field in names else self


class IdempotencyError(RequestError):
    """The Idempotency-Key or the event id belongs to a different request."""

    http_status: ClassVar[int] = 422


class GoneError(LLMServingError):
    """The stream or response that the client wants to continue no longer exists."""

    http_status: ClassVar[int] = 410


class ContextLengthError(RequestError):
    """The prompt, alone or with its output, exceeds the model's context length or the KV cache."""


class PermissionDeniedError(RequestError):
    """The API key does not permit the request."""

    http_status: ClassVar[int] = 403


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    http_status: ClassVar[int] = 404


class RequestNotFoundError(RequestError):
    """The id is unknown, or belongs to another tenant."""

    http_status: ClassVar[int] = 404


class RequestCancelledError(LLMServingError):
    """The request was cancelled by its tenant or an administrator."""

    http_status: ClassVar[int] = 409

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class TimedOutError(LLMServingError):
    """The request's deadline has passed, or cannot be met."""

    http_status: ClassVar[int] = 504


class RequestTooLargeError(RequestError):
    http_status: ClassVar[int] = 413


class RequestTimeoutError(RequestError):
    """The body did not arrive in time."""

    http_status: ClassVar[int] = 408


class CapacityError(LLMServingError):
    """The request is refused because of a load limit.

    Args:
        message: The limit that is reached, with the numbers.
        retry_after: Seconds until a retry is expected to succeed. None if unknown.
        queue_estimate_ms: Milliseconds that the request would have waited for its first token. None if unknown.
        predicted_s: Predicted seconds to the first token of a retry after `retry_after`. None if unknown.
    """

    http_status: ClassVar[int] = 429

    def __init__(
        self,
        message: str,
        retry_after: float | None = None,
        queue_estimate_ms: float | None = None,
        predicted_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.queue_estimate_ms = queue_estimate_ms
        self.predicted_s = predicted_s


class TooLateError(CapacityError):
    """The predicted first token is later than the request's deadline."""


class StoreFullError(CapacityError):
    """A store has no room for the request's data."""


class RateLimitError(CapacityError):
    """The limit per minute of the API key is exceeded, or the client address sent too many unknown keys."""


class UnavailableError(LLMServingError):
    """The server is loading or draining, or no WorkAgent is alive.

    `retry_after` is the number of seconds after which a retry may succeed. It is None if unknown.
    """

    http_status: ClassVar[int] = 503

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoWorkAgentsError(LLMServingError):
    """Every WorkAgent has exhausted its restarts, and the configuration sets `exit_without_work_agents`."""


class WorkerError(LLMServingError):
    """A WorkAgent failed. Only the requests of the step that it computed are affected."""


class WorkerDiedError(WorkerError):
    """The process of a WorkAgent exited, or its channel broke."""


class RankLostError(WorkerError):
    """Another rank of the replica exited or computes a different step, so no rank can continue."""


class StepMismatchError(WorkerError):
    """A reply does not match the step, KV slot, epoch or request in flight. The tokens in it are discarded."""


class ReceiptError(LLMServingError):
    """A receipt, the verifiable record of a response, is malformed or of a different version."""


class RecordingError(LLMServingError):
    """A recording of the scheduler is damaged, or does not match this version of the scheduler."""


class KernelError(LLMServingError):
    """The operator library cannot be built or loaded, it lacks memory, or one of its operators failed."""


class TransportError(LLMServingError):
    """A channel between master and WorkAgent failed."""


class ProtocolError(TransportError):
    """A frame is malformed, too long, or of a different protocol version."""


class ChannelClosedError(TransportError):
    """The peer closed the channel."""


class DeadlineExceededError(TransportError):
    """The peer did not reply in time."""
