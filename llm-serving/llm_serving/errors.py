"""Every error the package raises on purpose.

```
LLMServingError
├── ConfigError                 the YAML, an override or a model folder cannot be served
│   └── ModelError              a folder of weights is missing, unreadable or of an unknown family
├── AuthenticationError   401   no API key, or one that is not known
├── RequestError          400   a client's request breaks a rule: field, rule, value
│   ├── ContextLengthError 400  prompt and max_tokens do not fit the model or the KV cache
│   ├── PermissionDeniedError 403  its API key does not allow what it asks for
│   ├── RequestNotFoundError 404  no request of that id is known, or not to who asks
│   ├── ModelNotFoundError 404  the request names a model that is not served
│   ├── RequestTooLargeError 413
│   ├── RequestTimeoutError  408  its body did not arrive in time
│   └── IdempotencyError    422  its Idempotency-Key, or its event, was another request's
├── GoneError             410   what came before it can be gone on with no more
├── RequestCancelledError 409   it was cancelled, and its protocol has no word for that in an answer
├── TimedOutError         504   the deadline that the client gave has passed, or cannot be met any more
├── CapacityError         429   the waiting queue is full; retry_after in seconds
│   ├── TooLateError      429   its first token would come after the deadline that the client gave
│   ├── StoreFullError    429   what is kept of others leaves no room for it
│   └── RateLimitError    429   more than the API key or the address may ask for in a minute
├── UnavailableError      503   not ready yet, draining, or no WorkAgent lives
├── NoWorkAgentsError           every WorkAgent has used up its restarts, and the server shall end then
├── WorkerError           500   a WorkAgent failed on a step
│   ├── WorkerDiedError         its process ended or its channel broke
│   ├── RankLostError           another process of the same replica is gone, or computes something else
│   └── StepMismatchError       a reply does not match the step in flight
├── ReceiptError                a receipt cannot be read
├── RecordingError              a recording of the scheduler is damaged, or cannot be replayed
├── KernelError                 the operator library cannot be built or loaded, or has no memory
└── TransportError              a channel between master and WorkAgent
    ├── ProtocolError           a frame is malformed, too long or of another version
    ├── ChannelClosedError      the other side is gone
    └── DeadlineExceededError   no answer in time
```

`http_status` is what a client sees when the error ends its request.
"""

import contextlib
import reprlib
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

_short = reprlib.Repr()
_short.maxstring = 60
_short.maxother = 60
_short.maxlist = _short.maxtuple = _short.maxdict = 4


def shorten(value: object) -> str:
    """A bounded `repr` for error texts: a message never echoes megabytes of what a client sent."""
    try:
        return _short.repr(value)
    except ValueError:  # an integer beyond Python's limit of digits
        return f"<{type(value).__name__}>"


class LLMServingError(Exception):
    """Root of the tree."""

    http_status: ClassVar[int] = 500


class ConfigError(LLMServingError):
    """The configuration cannot be served; the text names file, line, key, rule and value where they exist."""


class ModelError(ConfigError):
    """A model folder is missing, unreadable or of a family that is not known."""


class AuthenticationError(LLMServingError):
    """The request shows no API key, or one that is not known."""

    http_status: ClassVar[int] = 401


class RequestError(LLMServingError):
    """A request breaks a rule.

    Args:
        field: Name of the field as the client wrote it.
        rule: What must hold, worded to follow the name: "must be >= 1".
        value: What was given; shown shortened. Leave it out when it would echo the client's text.
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
        """The same error by the name that the client gave the field, with another `value` if one is given."""
        return type(self)(field, self.rule, self._given if value is ... else value)


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Gives errors of requests the names that their fields have in a protocol.

    Args:
        names: What a field is called inside -> there; others keep theirs.
    """
    try:
        yield
    except RequestError as error:
        if error.field in names:
            raise error.renamed(names[error.field]) from None
        raise


class IdempotencyError(RequestError):
    """It came with the key, or the event, of another request."""

    http_status: ClassVar[int] = 422


class GoneError(LLMServingError):
    """What a client wants to go on with cannot be gone on with any more."""

    http_status: ClassVar[int] = 410


class ContextLengthError(RequestError):
    """The prompt, or the prompt with what it may generate, can never fit."""


class PermissionDeniedError(RequestError):
    """The API key does not allow what the request asks for."""

    http_status: ClassVar[int] = 403


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    http_status: ClassVar[int] = 404


class RequestNotFoundError(RequestError):
    """No request of that id is known, or it is another tenant's."""

    http_status: ClassVar[int] = 404


class RequestCancelledError(LLMServingError):
    """Somebody who may has cancelled the request."""

    http_status: ClassVar[int] = 409

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class TimedOutError(LLMServingError):
    """The deadline of the request has passed, or cannot be met any more."""

    http_status: ClassVar[int] = 504


class RequestTooLargeError(RequestError):
    """The body exceeds `serving_config.max_request_body_bytes`."""

    http_status: ClassVar[int] = 413


class RequestTimeoutError(RequestError):
    """The body of the request did not arrive in time."""

    http_status: ClassVar[int] = 408


class CapacityError(LLMServingError):
    """The request is refused because too much is waiting.

    Args:
        message: What is full, with the numbers.
        retry_after: Seconds after which a place is expected to be free for it; None when unknown.
        queue_estimate_ms: Milliseconds the request would have waited for its first token; None when unknown.
        predicted_s: Seconds to the first token of a client that comes back after `retry_after`; None when unknown.
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
    """The first token of the request would come after its deadline."""


class StoreFullError(CapacityError):
    """What the server keeps of others leaves no room for what the request would have it keep."""


class RateLimitError(CapacityError):
    """An API key asks for more than its row allows in a minute, or an address shows too many wrong ones."""


class UnavailableError(LLMServingError):
    """Nothing can be served at this moment: starting, draining, or no WorkAgent lives.

    Args:
        message: Why.
        retry_after: Seconds after which a retry has a chance; None when unknown.
    """

    http_status: ClassVar[int] = 503

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoWorkAgentsError(LLMServingError):
    """Every WorkAgent has used up its restarts, and the configuration wants the server to end then."""


class WorkerError(LLMServingError):
    """A WorkAgent failed; only the requests of its step are concerned."""


class WorkerDiedError(WorkerError):
    """The process of a WorkAgent ended, or its channel broke."""


class RankLostError(WorkerError):
    """Of the processes that compute a replica together one is gone, or does something else: none can go on."""


class StepMismatchError(WorkerError):
    """A reply does not match (step, slot, epoch, request) of what is in flight; its tokens are not used."""


class ReceiptError(LLMServingError):
    """What shall be a receipt is none, or none of this version."""


class RecordingError(LLMServingError):
    """A recording of the scheduler is damaged, or does not fit this version of the scheduler."""


class KernelError(LLMServingError):
    """The operator library cannot be built or loaded, or finds no memory for what it computes."""


class TransportError(LLMServingError):
    """A channel between master and WorkAgent failed."""


class ProtocolError(TransportError):
    """A frame is malformed, too long, or of another version of the protocol."""


class ChannelClosedError(TransportError):
    """The other side closed the channel."""


class DeadlineExceededError(TransportError):
    """The other side did not answer in time."""
