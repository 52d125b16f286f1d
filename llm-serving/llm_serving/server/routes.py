"""The table of all endpoints, joined from the tables of all modules with routes."""

from typing import Final

from llm_serving.server.admin import advice, lifecycle, live, replicas, requests, scheduler
from llm_serving.server.admin import models as served_models
from llm_serving.server.batches import api
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.idempotency import stream_routes
from llm_serving.server.protocols import legacy, tgi
from llm_serving.server.protocols.anthropic import messages
from llm_serving.server.protocols.openai import chat, completions, embeddings, models, responses, scores

__all__ = ["ENDPOINTS"]

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *stream_routes.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *scores.ENDPOINTS,
    *api.ENDPOINTS,
    *served_models.ENDPOINTS,
    *models.ENDPOINTS,
    *requests.ENDPOINTS,
    *scheduler.ENDPOINTS,
    *advice.ENDPOINTS,
    *replicas.ENDPOINTS,
    *lifecycle.ENDPOINTS,
    *live.ENDPOINTS,
    *tgi.ENDPOINTS,
    *legacy.ENDPOINTS,
)
