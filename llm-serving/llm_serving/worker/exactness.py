"""Guarantees about the bits of an answer, by `device_config.exactness` and backend. The log shows them at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.core.enums import ExactnessName

_BIT_IDENTICAL: Final = "the same request gets the same bytes, whatever runs beside it"
_OWN_PRODUCTS: Final = "products are MindSpore's own, which may order their sums by the shape of a batch"
ATTENTION_SPLITS: Final = (
    "the same bytes are not promised on Ascend: PagedAttention may split the keys of a row over the cores, and chooses "
    "the split by the shape of the whole batch, so the last bits of an answer depend on the requests beside it"
)
"""From the tiling of MindSpore 2.10's kernels: a row alone and the same row in a batch are split differently."""

GUARANTEES: Final[Mapping[tuple[ExactnessName, str], str]] = {
    (ExactnessName.EXACT, "cpu"): _BIT_IDENTICAL,
    (ExactnessName.FAST, "cpu"): f"{_BIT_IDENTICAL}: both kernels of attention add in one order here",
    (ExactnessName.EXACT, "plain"): f"the last bits of an answer are not promised: {_OWN_PRODUCTS}",
    (ExactnessName.EXACT, "ascend_invariant"): f"{ATTENTION_SPLITS}; products are batch-invariant",
    (ExactnessName.EXACT, "ascend"): f"{ATTENTION_SPLITS}; {_OWN_PRODUCTS}",
    (ExactnessName.FAST, "ascend_fast"): (
        "the last bits of an answer depend on what its prompt shares a step with: FlashAttentionScore computes steps "
        f"of whole prompts, PagedAttention the others, and {_OWN_PRODUCTS}"
    ),
}
"""(exactness, backend name) -> what is guaranteed."""


_OF_EXPERTS: Final = (
    f"{ATTENTION_SPLITS}; GroupedMatmulV4 multiplies experts, and may order its sums by how many rows an expert has"
)
"""Guarantee for a mixture of experts on a device without batch-invariant products for experts."""


def guarantee(exactness: str, backend_name: str, has_experts: bool = False) -> str:
    """Return what the answers of this server may depend on."""
    if has_experts and backend_name == "ascend_invariant":
        return _OF_EXPERTS
    return GUARANTEES[ExactnessName(exactness), backend_name]
