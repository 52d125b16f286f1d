"""A small model: configuration, tensors and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from families.shapes import Shapes

ENDS = {"bos_token_id": 1, "eos_token_id": 2}
PUBLISHED: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3", "use_cache": True, **ENDS,
}  # fmt: skip
"""Keys of published configurations that a server ignores."""

SHORT, CROSSING, LONG = 5, 60, 200
"""Prompt lengths. With the 24 tokens that follow, `CROSSING` begins within a window or an original context of `NEAR`
and ends beyond it, `LONG` begins beyond it and ends within `FAR`."""

NEAR, FAR = 64, 256


@dataclass(frozen=True)
class Model:
    config: dict[str, Any]
    """config.json, in the form in which the family is published."""

    shapes: Shapes

    lengths: tuple[int, ...] = (SHORT, LONG)
    """Tokens of the prompts for which there are golden values."""

    served_length: int | None = None
    """If rotary factors depend on the length: the longest context of the server, which selects them."""

    matters: tuple[dict[str, Any], ...] = ()
    """Changes of the configuration (None removes a key) without which a reader gets other logits."""

    norm_offset: float = 0.0
    """Value that the network adds to stored norm weights."""

    head_norm: float = 1.5
    """Mean of the norm weights of queries and keys. If scores are not scaled, smaller weights prevent a single key from
    dominating."""

    bias_spread: float = 0.4
    """Standard deviation of biases. Where every product and norm has one, larger ones alone choose the next token."""

    generation: dict[str, Any] = field(default_factory=lambda: {"_from_model_config": True, **ENDS})
    """generation_config.json."""

    @property
    def tied(self) -> bool:
        """Whether the LM head is the token embedding."""
        return not {"lm_head.weight", "output.weight", "embed_out.weight"} & set(self.shapes)

    @property
    def end_token_ids(self) -> list[int]:
        ends = self.generation["eos_token_id"]
        return ends if isinstance(ends, list) else [ends]
