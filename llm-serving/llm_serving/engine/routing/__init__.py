"""Which replica gets a request: one file a rule, one line here."""

from collections.abc import Callable
from typing import Final

from llm_serving.core.choices import RoutingName
from llm_serving.engine.routing.base import Candidate, Candidates, Predict, Routing
from llm_serving.engine.routing.block_cost import BlockCost
from llm_serving.engine.routing.least_loaded import LeastLoaded
from llm_serving.engine.routing.predicted_ttft import PredictedTTFT
from llm_serving.engine.routing.prefix_affinity import PrefixAffinity
from llm_serving.engine.routing.round_robin import RoundRobin

ROUTINGS: Final[dict[str, Callable[[], Routing]]] = {
    RoutingName.PREDICTED_TTFT: PredictedTTFT,
    RoutingName.PREFIX_AFFINITY: PrefixAffinity,
    RoutingName.BLOCK_COST: BlockCost,
    RoutingName.LEAST_LOADED: LeastLoaded,
    RoutingName.ROUND_ROBIN: RoundRobin,
}

__all__ = ["ROUTINGS", "Candidate", "Candidates", "Predict", "Routing"]
