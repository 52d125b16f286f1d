"""The guarantees about the bits of an answer that `device_config.exactness` and the backend give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.core.enums import ExactnessName, QuantizationName
from llm_serving.errors import ConfigError
from llm_serving.network.builder import Network

_BIT_IDENTICAL: Final = "the same request gets the same bytes, whatever runs beside it"
_OWN_PRODUCTS: Final = "products are MindSpore's own, which may order their sums by the shape of a batch"
_ROW_ALONE: Final = (
    "each token is a row of PagedAttention whose plan does not depend on other rows, products are batch-invariant, and "
    "ranks add in their order; this follows from MindSpore 2.10's tiling and was not verified on a device"
)
ATTENTION_SPLITS: Final = (
    "bit-identical answers are not guaranteed on Ascend: PagedAttention may split the keys of a row over the cores, "
    "and chooses the split by the shape of the whole batch, so the last bits of an answer depend on the requests "
    "beside it"
)
"""Source: the tiling of MindSpore 2.10's kernels, which splits a row in a batch differently from the same row alone."""

GUARANTEES: Final[Mapping[tuple[ExactnessName, str], str]] = {
    (ExactnessName.EXACT, "cpu"): _BIT_IDENTICAL,
    (ExactnessName.FAST, "cpu"): f"{_BIT_IDENTICAL}: both kernels of attention add in one order here",
    (ExactnessName.EXACT, "plain"): f"the last bits of an answer are not guaranteed: {_OWN_PRODUCTS}",
    (ExactnessName.EXACT, "ascend_invariant"): f"{_BIT_IDENTICAL}: {_ROW_ALONE}",
    (ExactnessName.EXACT, "ascend"): f"{ATTENTION_SPLITS}; {_OWN_PRODUCTS}",
    (ExactnessName.FAST, "ascend_fast"): (
        "the last bits of an answer depend on the requests that share a step with its prompt: FlashAttentionScore "
        f"computes steps of whole prompts, PagedAttention the others, and {_OWN_PRODUCTS}"
    ),
}


OF_EXPERTS: Final = (
    "bit-identical answers are not guaranteed on Ascend: GroupedMatmulV4 multiplies experts, and may order its sums by "
    "how many rows an expert has"
)
"""The guarantee for experts in the model dtype. Products of 8-bit experts are exact."""


def has_experts_in_dtype(network: Network, quantization: str | None) -> bool:
    """Return whether a network multiplies experts in the model dtype, which is not batch-invariant on Ascend."""
    has_experts = any(each.kind == "experts" for each in network.operations)
    return has_experts and quantization != QuantizationName.W8A8


def guarantee(exactness: str, backend_name: str, has_experts: bool = False) -> str:
    """Return a text: whether answers are bit-identical, and if not, why. `has_experts`: see `has_experts_in_dtype`."""
    if has_experts and backend_name == "ascend_invariant":
        return OF_EXPERTS
    return GUARANTEES[ExactnessName(exactness), backend_name]


_BLOCKS_JOINED: Final = (64, 128)
"""Block sizes for which PagedAttention's order of sums depends on other rows: it takes 256 keys of a row at a time if
any context of the step has 256 tokens, and 128 otherwise."""


def check_block_size(attention_rows: int, block_size: int) -> None:
    """Raise ConfigError if, with this block size, the order in which PagedAttention sums over a row's keys may depend
    on other rows. If `Backend.attention_rows` is 0 (attention does not compute each token as a request), allow all.
    """
    if attention_rows and block_size in _BLOCKS_JOINED:
        raise ConfigError(
            "`pa_config.block_size` must be 16 or 32 with `device_config.exactness: exact` on Ascend: with 64 or 128, "
            "PagedAttention adds the keys of a row in another order as soon as any context of the step has 256 tokens. "
            f"Set one of these sizes, or `exactness: fast`. Given: {block_size}"
        )
