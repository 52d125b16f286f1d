"""Files of requests that are answered when there is room: kept in SQLite, so that an end of the process loses none."""

from llm_serving.server.batches.runner import Ask, Batches
from llm_serving.server.batches.schemas import ENDPOINTS_OF_LINES, Batch, FileObject
from llm_serving.server.batches.store import BatchStore

__all__ = ["ENDPOINTS_OF_LINES", "Ask", "Batch", "BatchStore", "Batches", "FileObject"]
