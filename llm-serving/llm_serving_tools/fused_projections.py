"""Splits the fused projections of MindFormers into the weights of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from llm_serving.formats.mindformers_names import GATE_UP, QKV, Order, hugging_face_name
from llm_serving.formats.stored_tensor import Array


def split(name: str, array: Array, order: Order, heads: int, kv_heads: int) -> Mapping[str, Array]:
    """Return the weights in `array` by Hugging Face's names. A fused weight (q, k and v, or gate and up) has rows in
    `order` and is split; any other weight is returned whole.
    """
    if match := QKV.match(name):
        at = hugging_face_name(match["at"])
        names = [f"{at}.self_attn.{each}_proj.{match['kind']}" for each in "qkv"]
        size = array.shape[0] // (heads + 2 * kv_heads)
        per_group = [heads // kv_heads * size, size, size]
        return dict(zip(names, _parts(array, order, kv_heads, per_group), strict=True))
    if match := GATE_UP.match(name):
        at = hugging_face_name(match["at"])
        names = [f"{at}.mlp.{each}_proj.{match['kind']}" for each in ("gate", "up")]
        return dict(zip(names, _parts(array, order, array.shape[0] // 2, [1, 1]), strict=True))
    return {hugging_face_name(name): array}


def _parts(array: Array, order: Order, groups: int, per_group: Sequence[int]) -> list[Array]:
    if order == "stacked":
        return np.split(array, np.cumsum([groups * rows for rows in per_group])[:-1])
    grouped = array.reshape(groups, sum(per_group), *array.shape[1:])
    parts = np.split(grouped, np.cumsum(per_group)[:-1], axis=1)
    return [part.reshape(-1, *array.shape[1:]) for part in parts]
