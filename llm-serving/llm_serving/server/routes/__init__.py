"""Who answers which path: one module a protocol, each with a table of endpoints."""

from typing import Final

from llm_serving.server.endpoint import Endpoint
from llm_serving.server.routes import (
    advice,
    batches,
    chat,
    completions,
    control,
    embeddings,
    explanations,
    health,
    legacy,
    live,
    messages,
    metrics,
    models,
    reload,
    replicas,
    responses,
    scores,
    streams,
    tgi,
)

__all__ = ["ENDPOINTS"]

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *streams.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *scores.ENDPOINTS,
    *batches.ENDPOINTS,
    *models.ENDPOINTS,
    *explanations.ENDPOINTS,
    *control.ENDPOINTS,
    *advice.ENDPOINTS,
    *replicas.ENDPOINTS,
    *reload.ENDPOINTS,
    *live.ENDPOINTS,
    *health.ENDPOINTS,
    *metrics.ENDPOINTS,
    *tgi.ENDPOINTS,
    *legacy.ENDPOINTS,
)
