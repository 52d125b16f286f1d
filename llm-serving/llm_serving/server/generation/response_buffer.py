"""A bound on the memory of whole responses: each is buffered until all of it has been generated.

A stream sends its outputs and forgets them. A whole response grows until it is complete: hundreds of choices with
twenty top logprobs per token reach gigabytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import Request

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError, RequestError, UnavailableError
from llm_serving.server.generation.generation import Generation
from llm_serving.server.generation.streaming import complete
from llm_serving.server.parsing.caller import source_of

KEY: Final = "serving_config.max_buffered_response_bytes"
OUTPUT_BYTES, LOGPROB_BYTES = 128, 256
"""Memory of an output beside its text, and of a logprob with its token, whose bytes most protocols hold in a list."""
RETRY_AFTER_S: Final = 1.0

T = TypeVar("T")


class BufferedResponse:
    """The memory of one response.

    Args:
        buffers: The memory of all responses.
        source: The client that is charged for it.
        cancel: Ends the work on the response.
    """

    def __init__(self, buffers: ResponseBuffers, source: str, cancel: Callable[[], None]) -> None:
        self._buffers = buffers
        self.source = source
        self._cancel = cancel
        self.failure: LLMServingError | None = None
        """Why the response was evicted."""
        self.num_bytes = 0

    def add(self, output: RequestOutput) -> None:
        """Charge an output. Raise LLMServingError where the response has been evicted, now or before."""
        self._buffers.grow(self, buffered_bytes(output))
        if self.failure is not None:
            raise self.failure

    def evict(self, error: LLMServingError) -> None:
        """End the work, because other responses need the memory."""
        self.failure = error
        self._cancel()


class ResponseBuffers:
    """The memory of all responses that are being built. It belongs to the event loop.

    When they exceed the limit, the largest response of the client that holds most is evicted.

    Args:
        max_bytes: Limit for all responses together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._responses: set[BufferedResponse] = set()
        self._of_source: Counter[str] = Counter()
        self.num_bytes = 0

    def open(self, source: str, cancel: Callable[[], None]) -> BufferedResponse:
        """Return an empty response; `release` it in the end."""
        response = BufferedResponse(self, source, cancel)
        self._responses.add(response)
        return response

    def release(self, response: BufferedResponse) -> None:
        """Free the memory of a response; does nothing the second time."""
        if response in self._responses:
            self._responses.remove(response)
            self.num_bytes -= response.num_bytes
            self._of_source[response.source] -= response.num_bytes
            if not self._of_source[response.source]:
                del self._of_source[response.source]

    def grow(self, response: BufferedResponse, num_bytes: int) -> None:
        """Charge further bytes to a response, unless it has been released or evicted."""
        if response not in self._responses:
            return
        response.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._of_source[response.source] += num_bytes
        while self.num_bytes > self.max_bytes:
            [(source, _)] = self._of_source.most_common(1)
            largest = max((each for each in self._responses if each.source == source), key=lambda each: each.num_bytes)
            self.release(largest)
            largest.evict(self._error(largest))

    def _error(self, largest: BufferedResponse) -> LLMServingError:
        if largest.num_bytes > self.max_bytes:
            rule = f"must ask for an answer that takes at most {self.max_bytes} bytes of memory ({KEY})"
            return RequestError("body", f"{rule}, or for a stream")
        return UnavailableError(f"answers in one piece hold more than {self.max_bytes} bytes ({KEY})", RETRY_AFTER_S)


def buffered_bytes(output: RequestOutput) -> int:
    """Return about how many bytes of a response an output becomes."""
    size = OUTPUT_BYTES + len(output.text) + sum(map(buffered_bytes, output.beams))
    if output.logprobs:
        size += LOGPROB_BYTES * sum(1 + len(token.top_token_ids) for token in output.logprobs)
    if (of_prompt := output.prompt_logprobs) is not None:
        size += LOGPROB_BYTES * (len(of_prompt) + of_prompt.top_token_ids.size)
    return size if output.vector is None else size + output.vector.nbytes


async def buffered(http_request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which builds a whole response from a generation, and charge its memory meanwhile.

    Raises:
        RequestError: The response alone exceeds the limit.
        UnavailableError: All responses together exceed it, and this is the largest of the client that holds most.
    """
    buffers = http_request.app.response_buffers
    assert isinstance(buffers, ResponseBuffers)
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if asyncio.current_task() is not task:
            task.cancel()

    response = buffers.open(source_of(http_request), cancel)
    generation.report_reads(response.add)
    try:
        result = await work
        if response.failure is not None:
            await asyncio.sleep(0)  # it was evicted and has not been suspended since: be cancelled here
        return result
    except asyncio.CancelledError:
        if response.failure is not None and task.uncancel() == 0:
            raise response.failure from None
        raise
    finally:
        response.failure = None  # break the cycle: the error's traceback refers to this frame
        generation.report_reads(None)
        buffers.release(response)


async def complete_whole(http_request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """As `buffered`, and close the generation, however it ends.

    Raises:
        ClientGoneError: The client disconnected before; the work was cancelled.
    """
    return await complete(http_request.receive, generation, buffered(http_request, generation, work))
