"""Models by name, from Hugging Face or ModelScope; the network is used only if the operator gave a name.

`locate` finds a model in the local caches, or downloads the files that determine whether it can be served; `download`
gets the rest.
"""

from llm_serving.hub.base import NAME_FORM, is_revision, why_not_a_name
from llm_serving.hub.find import HUBS, HubModel, cached_models, download, locate

__all__ = ["HUBS", "NAME_FORM", "HubModel", "cached_models", "download", "is_revision", "locate", "why_not_a_name"]
