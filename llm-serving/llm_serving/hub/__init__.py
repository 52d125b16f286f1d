"""Models given by name, from Hugging Face or ModelScope. Only such models use the network."""

from llm_serving.hub.base import NAME_FORM, is_revision, why_not_a_name
from llm_serving.hub.find import HUBS, HubModel, cached_models, download, locate

__all__ = ["HUBS", "NAME_FORM", "HubModel", "cached_models", "download", "is_revision", "locate", "why_not_a_name"]
