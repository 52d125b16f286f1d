"""What an answer's bytes depend on, by `device_config.exactness` and by what computes; the log tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.core.enums import ExactnessName

_SAME_BYTES: Final = "the same request gets the same bytes, whatever runs beside it"
_OWN_PRODUCTS: Final = "products are MindSpore's own, which may order their sums by the shape of a batch"
ATTENTION_SPLITS: Final = (
    "the same bytes are not promised on Ascend: PagedAttention may split the keys of a row over the cores, and chooses "
    "the split by the shape of the whole batch, so the last bits of an answer depend on the requests beside it"
)
"""Read off the tiling of MindSpore 2.10's own kernels: a row alone and the same row beside others differ in it."""

PROMISES: Final[Mapping[tuple[ExactnessName, str], str]] = {
    (ExactnessName.EXACT, "cpu"): _SAME_BYTES,
    (ExactnessName.FAST, "cpu"): f"{_SAME_BYTES}: both kernels of attention add in one order here",
    (ExactnessName.EXACT, "plain"): f"the last bits of an answer are not promised: {_OWN_PRODUCTS}",
    (ExactnessName.EXACT, "ascend_invariant"): f"{ATTENTION_SPLITS}; products are batch-invariant",
    (ExactnessName.EXACT, "ascend"): f"{ATTENTION_SPLITS}; {_OWN_PRODUCTS}",
    (ExactnessName.FAST, "ascend_fast"): (
        "the last bits of an answer depend on what its prompt shares a step with: FlashAttentionScore computes steps "
        f"of whole prompts, PagedAttention the others, and {_OWN_PRODUCTS}"
    ),
}
"""Exactness and name of the backend -> what is promised."""


_OF_EXPERTS: Final = (
    f"{ATTENTION_SPLITS}; GroupedMatmulV4 multiplies experts, and may order its sums by how many rows an expert has"
)
"""Said of a model with experts, for which the device has no batch-invariant products."""


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
