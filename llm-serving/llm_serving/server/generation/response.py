"""Responses: each protocol builds its own from the outputs of a generation, as a stream or as a whole."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError
from llm_serving.server.generation.generation import Generation, raise_unless_complete
from llm_serving.server.generation.pipeline import StartedGeneration
from llm_serving.server.generation.response_buffer import complete_whole
from llm_serving.server.generation.streaming import EVENT_STREAM, Chunks, StreamResponse
from llm_serving.server.idempotency.resumable_stream import NumberedPieces
from llm_serving.server.parsing.offload import INLINE_BYTES, INLINE_TOKENS


class ResponseBuilder(ABC):
    """Builds the response of one protocol.

    A whole response is the fold of the deltas that a stream sends: `encode_delta` writes the delta of an output as
    bytes of the stream, `fold` adds it to the response.
    """

    media_type = EVENT_STREAM
    """Content type of the stream."""

    def check(self, output: RequestOutput) -> None:
        """Raise LLMServingError for the last output of a choice where the protocol cannot express its finish reason."""
        raise_unless_complete(output)

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        """Return what a stream sends for an output of a choice; may be empty."""
        if output.finish_reason is not None:
            self.check(output)
        return self.encode_delta(index, output)

    @abstractmethod
    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        """Return the delta of an output as bytes of a stream."""

    @abstractmethod
    def fold(self, index: int, output: RequestOutput) -> None:
        """Add the delta of an output to the response."""

    async def finish(self) -> bytes:
        """Return what a stream sends after the last output."""
        return b""

    @abstractmethod
    def error_chunk(self, error: LLMServingError) -> bytes:
        """Return the last bytes of a stream that fails, whose status has been sent already."""

    async def collect(self, generation: Generation) -> None:
        """Fold all outputs; long ones off the event loop."""
        async for index, output in generation.outputs():
            if output.finish_reason is not None:
                self.check(output)
            if len(output.text) > INLINE_BYTES or len(output.logprobs) > INLINE_TOKENS:
                await asyncio.to_thread(self.fold, index, output)
            else:
                self.fold(index, output)
        await self.complete()

    async def complete(self) -> None:
        """Finish the response once all outputs have been folded."""
        return

    @abstractmethod
    async def response(self, headers: dict[str, str]) -> Response:
        """Return the whole response."""


async def respond(
    http_request: Request, started: StartedGeneration, builder: ResponseBuilder, *, stream: bool
) -> Response:
    """Return the response as a stream or, once the generation has finished, as a whole.

    Raises:
        ClientGoneError: The client left before the response was whole.
    """
    generation, turn = started.generation, started.turn
    if stream:
        chunks: Chunks = builder
        if turn.stream_id:
            chunks = NumberedPieces(builder, turn.stream_id, generation.num_streams, turn.position)
        headers = started.identity.headers | turn.headers
        return StreamResponse(generation, chunks, builder.error_chunk, media_type=builder.media_type, headers=headers)
    await complete_whole(http_request, generation, builder.collect(generation))
    return await builder.response(started.identity.headers | generation.headers | turn.headers)
