"""What an answer's bytes depend on, by `device_config.exactness` and by what computes; the log tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.core.choices import ExactnessName

_SAME_BYTES: Final = "the same request gets the same bytes, whatever runs beside it"
_OWN_PRODUCTS: Final = "products are MindSpore's own, which may order their sums by the shape of a batch"

PROMISES: Final[Mapping[tuple[ExactnessName, str], str]] = {
    (ExactnessName.EXACT, "cpu"): _SAME_BYTES,
    (ExactnessName.FAST, "cpu"): f"{_SAME_BYTES}: both kernels of attention add in one order here",
    (ExactnessName.EXACT, "plain"): f"the last bits of an answer are not promised: {_OWN_PRODUCTS}",
    (ExactnessName.EXACT, "ascend_invariant"): (
        f"{_SAME_BYTES}: PagedAttention computes every step, and products are batch-invariant; not verified on a device"
    ),
    (ExactnessName.EXACT, "ascend"): (
        "what a prompt shares a step with changes no kernel: PagedAttention computes every step; the last bits of an "
        f"answer are not promised: {_OWN_PRODUCTS}"
    ),
    (ExactnessName.FAST, "ascend_fast"): (
        "the last bits of an answer depend on what its prompt shares a step with: FlashAttentionScore computes steps "
        f"of whole prompts, PagedAttention the others, and {_OWN_PRODUCTS}"
    ),
}
"""Exactness and name of the backend -> what is promised."""


_OF_EXPERTS: Final = (
    "what a prompt shares a step with changes no kernel: PagedAttention computes every step; the last bits of an "
    "answer are not promised: GroupedMatmulV4 multiplies experts, and may order its sums by how many rows an expert has"
)
"""In place of a promise of the device's batch-invariant products: there are none of experts."""


def promise(exactness: str, backend_name: str, has_experts: bool = False) -> str:
    """What answers of this server may depend on.

    Args:
        exactness: `device_config.exactness`.
        backend_name: `Backend.name` of what computes.
        has_experts: The model has.
    """
    if has_experts and backend_name == "ascend_invariant":
        return _OF_EXPERTS
    return PROMISES[ExactnessName(exactness), backend_name]
