"""Routes of OpenAI's files and batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from llm_serving.core.sampling_params import Whole
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import (
    CapacityError,
    RequestError,
    RequestNotFoundError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from llm_serving.server.batches.runner import WINDOW_S, Batches
from llm_serving.server.batches.schemas import (
    ENDPOINTS_OF_LINES,
    Batch,
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from llm_serving.server.batches.store import CHUNK_BYTES, KEPT_S, BatchStore, new_file, new_id
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.http.request import REQUEST_KEY
from llm_serving.server.middleware.authentication import tenant_seen
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.requests import PAGE, check_metadata, page_of, page_response
from llm_serving.server.request_context import api_key_of

PURPOSE: Final = "batch"
MAX_FILENAME_CHARS: Final = 256
MAX_FIELD_BYTES: Final = 4096
HELD_BYTES: Final = MultiPartParser.spool_max_size + 2**16
"""Maximum bytes of an uploaded form in memory. The rest of a longer form is written to disk."""
RETRY_AFTER_S: Final = 10.0
KEPT_LEAST_S: Final = 3600
"""Minimum lifetime of a file in seconds (OpenAI's limit). The maximum is `KEPT_S`."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
# The form parser logs each malformed form, without a limit. The server logs refused requests itself, with a limit.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
_FILES: Final = {**PAGE, "purpose": {"type": "string"}}

_FILE: Final = "/v1/files/{file_id}"
_BATCH: Final = "/v1/batches/{batch_id}"
ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add("POST", "/v1/files", "Upload a file of requests", answer=FileObject, takes_form=True)
async def create_file(engine: AsyncEngine, http_request: Request) -> Response:
    batches = _batches(http_request)
    limits = engine.config.serving
    if (of_connection := http_request.scope.get(REQUEST_KEY)) is not None:
        of_connection.max_weight = HELD_BYTES
    try:
        async with (
            asyncio.timeout(limits.body_timeout_s),
            _counted(batches, http_request) as counted,
            counted.form(max_files=1, max_fields=4, max_part_size=MAX_FIELD_BYTES) as form,
        ):
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise RequestError("file", "is required, in a form of the kind multipart/form-data")
            if purpose != PURPOSE:
                raise RequestError("purpose", f"must be {PURPOSE}", purpose)
            "".join([*form, file.filename or ""]).encode()  # refuses lone surrogates, which UTF-7 can encode
            name = (file.filename or "")[:MAX_FILENAME_CHARS]
            about = new_file(new_id("file"), name, PURPOSE, batches.now())
            if (seconds := _lifetime_s(form)) is not None:
                about.expires_at = about.created_at + seconds
            pieces = iter(lambda: file.file.read(CHUNK_BYTES), b"")
            about = await batches.stored(BatchStore.add_file, about, _tenant(http_request), pieces, batches.now())
    except HTTPException as error:  # raised by Starlette's form parser
        raise RequestError("body", f"must be a form of the kind multipart/form-data: {error.detail}") from None
    except UnicodeError:
        rule = "must be a form whose field and file names are valid text in its charset, by default UTF-8"
        raise RequestError("body", rule) from None
    except TimeoutError:
        raise RequestTimeoutError("body", f"must arrive within {limits.body_timeout_s:g} seconds") from None
    return json_response(about)


@ENDPOINTS.add("GET", "/v1/files", "List files", answer=FileList, query=_FILES)
async def list_files(engine: AsyncEngine, http_request: Request) -> Response:
    return await _page(http_request, FileList, BatchStore.files, http_request.query_params.get("purpose"))


@ENDPOINTS.add("GET", _FILE, "Show the metadata of a file", answer=FileObject)
async def show_file(engine: AsyncEngine, http_request: Request) -> Response:
    return json_response(await _file(http_request))


@ENDPOINTS.add("GET", f"{_FILE}/content", "Download the content of a file")
async def show_content(engine: AsyncEngine, http_request: Request) -> Response:
    about, batches = await _file(http_request), _batches(http_request)

    async def pieces() -> AsyncIterator[bytes]:
        number = 0
        while (piece := await batches.stored(BatchStore.chunk, about.id, number)) is not None:
            yield piece
            number += 1

    # The response states its length. If the file is deleted meanwhile, the client sees that the response is incomplete.
    return StreamingResponse(pieces(), headers={"content-length": str(about.bytes)}, media_type="application/jsonl")


@ENDPOINTS.add("DELETE", _FILE, "Delete a file", answer=DeletedFile)
async def delete_file(engine: AsyncEngine, http_request: Request) -> Response:
    """Delete a file. A batch that has started is not affected, because it has a copy of the file's lines."""
    about = await _file(http_request)
    await _batches(http_request).stored(BatchStore.delete_file, about.id)
    return json_response(DeletedFile(about.id))


@ENDPOINTS.add("POST", "/v1/batches", "Run all requests of a file as a batch", body=BatchRequest, answer=Batch)
async def create_batch(engine: AsyncEngine, http_request: Request) -> Response:
    request = await read_fields(engine, http_request, BatchRequest)
    batches = _batches(http_request)
    if request.endpoint not in ENDPOINTS_OF_LINES:
        raise RequestError("endpoint", f"must be one of {', '.join(ENDPOINTS_OF_LINES)}", request.endpoint)
    check_metadata(request.metadata)
    try:
        await batches.stored(BatchStore.file, request.input_file_id, tenant_seen(http_request))
    except RequestError as error:
        raise error.renamed("input_file_id", request.input_file_id) from None
    created = int(batches.now())
    batch = Batch(
        id=new_id("batch"),
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        created_at=created,
        expires_at=created + WINDOW_S,
        metadata=request.metadata,
    )
    await batches.create(batch, _tenant(http_request))
    return json_response(batch)


@ENDPOINTS.add("GET", "/v1/batches", "List batches", answer=BatchList, query=PAGE)
async def list_batches(engine: AsyncEngine, http_request: Request) -> Response:
    return await _page(http_request, BatchList, BatchStore.batches)


@ENDPOINTS.add("GET", _BATCH, "Show a batch", answer=Batch)
async def show_batch(engine: AsyncEngine, http_request: Request) -> Response:
    return json_response(await _batch(http_request))


@ENDPOINTS.add("POST", f"{_BATCH}/cancel", "Cancel a batch", answer=Batch)
async def cancel_batch(engine: AsyncEngine, http_request: Request) -> Response:
    return json_response(await _batches(http_request).cancel((await _batch(http_request)).id))


def _batches(http_request: Request) -> Batches:
    batches = http_request.app.batches
    if batches is None:
        raise RequestNotFoundError("serving_config.batch_path", "must name a file, in which batches are stored")
    assert isinstance(batches, Batches)
    return batches


async def _file(http_request: Request) -> FileObject:
    file_id, tenant = http_request.path_params["file_id"], tenant_seen(http_request)
    return await _batches(http_request).stored(BatchStore.file, file_id, tenant)


async def _batch(http_request: Request) -> Batch:
    batch_id, tenant = http_request.path_params["batch_id"], tenant_seen(http_request)
    return await _batches(http_request).stored(BatchStore.batch, batch_id, tenant)


def _tenant(http_request: Request) -> str:
    key = api_key_of(http_request)
    return "" if key is None else key.name


def _lifetime_s(form: FormData) -> int | None:
    names = [name for name, _ in form.multi_items()]
    for name in names:
        if name not in ("file", "purpose", _ANCHOR, _SECONDS):
            raise RequestError(name[:MAX_FILENAME_CHARS], "is not a field of this form")
        if names.count(name) > 1:
            raise RequestError(name, "must be given once")
    anchor, given = form.get(_ANCHOR), form.get(_SECONDS)
    if anchor is None and given is None:
        return None
    if anchor != "created_at":
        raise RequestError(_ANCHOR, "must be created_at", anchor)
    is_number = isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 9
    return int(Whole(KEPT_LEAST_S, KEPT_S).checked(_SECONDS, int(str(given)) if is_number else given))


async def _page(
    http_request: Request, kind: type[FileList | BatchList], select: Callable[..., list[Any]], *filters: str | None
) -> Response:
    limit, after = page_of(http_request)
    try:
        found = await _batches(http_request).stored(select, tenant_seen(http_request), *filters, limit + 1, after)
    except RequestError as error:
        raise error.renamed_by({"file_id": "after", "batch_id": "after"}) from None
    return await page_response(kind, found, limit)


@asynccontextmanager
async def _counted(batches: Batches, http_request: Request) -> AsyncIterator[Request]:
    """Yield the request with a counter of received body bytes. Receiving raises RequestTooLargeError if the body is too
    large, and CapacityError if all bodies that are being uploaded exceed their quota.
    """
    shares, incoming, tenant = batches.shares, batches.num_incoming_bytes, _tenant(http_request)
    num_bytes, most = 0, shares.room(0, 0)

    async def receive() -> Message:
        nonlocal num_bytes
        message = await http_request.receive()
        size = len(message.get("body", b""))
        room = shares.room(incoming.total(), incoming[tenant])
        num_bytes += size
        incoming[tenant] += size
        if num_bytes > most:
            raise RequestTooLargeError("body", f"must be at most {most} bytes (serving_config.batch_store_bytes)")
        if size > room:
            limit = f"the files that are being uploaded may together {shares.rule}"
            raise CapacityError(f"{limit}; retry later", RETRY_AFTER_S)
        return message

    try:
        yield Request(http_request.scope, receive)
    finally:
        incoming[tenant] -= num_bytes
