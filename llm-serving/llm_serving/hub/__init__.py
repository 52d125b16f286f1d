"""Models by name, from Hugging Face or ModelScope. A network is asked only where the operator wrote a name.

`locate` finds a model in the local caches, or downloads what tells whether it can be served; `download` gets the rest.
"""

from llm_serving.hub.base import NAME_FORM, is_revision, why_no_name
from llm_serving.hub.find import HUBS, HubModel, cached_models, download, locate

__all__ = ["HUBS", "NAME_FORM", "HubModel", "cached_models", "download", "is_revision", "locate", "why_no_name"]
