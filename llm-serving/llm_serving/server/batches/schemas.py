"""Structs of OpenAI's files and batches, and of the lines in these files."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

from llm_serving.server.protocols.openai.schemas import Page

ENDPOINTS_OF_LINES: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
ENDED: Final = frozenset(("completed", "failed", "expired", "cancelled"))


class FileObject(Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileList(Page):
    data: list[FileObject]


class DeletedFile(Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class LineError(Struct):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(Struct):
    data: list[LineError]
    object: str = "list"


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    """validating, in_progress, finalizing or cancelling; at the end completed, failed, expired or cancelled."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class BatchList(Page):
    data: list[Batch]


class BatchRequest(Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class Line(Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: Literal["POST"] = "POST"
    url: str
    body: msgspec.Raw


class LineAnswer(Struct, omit_defaults=True):
    status_code: int
    request_id: str
    body: msgspec.Raw | dict[str, Any]
    ignored_parameters: str | None = None


class Failure(Struct):
    code: str
    message: str


class AnsweredLine(Struct, kw_only=True):
    id: str
    custom_id: str
    response: LineAnswer | None = None
    error: Failure | None = None
