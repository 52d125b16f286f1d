"""What `model_config.backend: ge` asks of the configuration: graphs from files hold weights and caches in them."""

from __future__ import annotations

from typing import Final

from llm_serving.config.values import Values
from llm_serving.core.enums import ExactnessName

BACKEND: Final = "model_config.backend"
MINDIR_PATH: Final = "model_config.mindir_path"
MINDIR_INI: Final = "model_config.mindir_ini"

_NEEDED: Final = (
    ("device_config.device_target", "Ascend", "the graph engine is of Ascend"),
    ("device_config.exactness", ExactnessName.EXACT, "one graph computes all steps"),
    ("scheduler_config.preemption_mode", "recompute", "nothing reaches the caches inside a graph"),
    ("pa_config.num_swap_blocks", 0, "nothing reaches the caches inside a graph"),
)
"""Key, the value it must have, and why."""


def check_graph_engine(values: Values) -> None:
    """Refuses what graphs from files cannot do; what names none is served without them, with a notice.

    Raises:
        ConfigError: A combination that cannot be served.
    """
    if not values.is_given(MINDIR_PATH):
        if values[BACKEND] == "ge":
            values.notice(BACKEND, f"ge is served as kbk: {MINDIR_PATH} names no graphs of `llm-serving export`")
        if values.is_given(MINDIR_INI):
            source = values.source(MINDIR_INI)
            values.notice(MINDIR_INI, f"{values[MINDIR_INI]} has no meaning without {MINDIR_PATH}")
            values.set(MINDIR_INI, None, source)
        return
    if values[BACKEND] != "ge":
        raise values.error(MINDIR_PATH, f"must be left out with {BACKEND}: {values[BACKEND]}", values[MINDIR_PATH])
    for name, needed, why in _NEEDED:
        if values[name] != needed:
            raise values.error(name, f"must be {needed} with {BACKEND}: ge: {why}", values[name])
    if values["pa_config.num_blocks"] is None:
        rule = f"must be given with {BACKEND}: ge: the graph has a cache of so many"
        raise values.error("pa_config.num_blocks", rule, None)
    values.notice(BACKEND, "ge copies no blocks: requests with n, best_of or beams end with an error")
