"""Latent attention (MLA) as MindFormers' DeepSeek-V3 class computes it: its weights and its cache.

The class has the absorbed form of `models.latent_attention`, with three differences:

- The latent vector and the rotary key of a token are in one tensor. PagedAttention takes the first 512 elements of a
  key as its value (`mla_v_dim`).
- One product computes the latent vector, the rotary key and the compressed query.
- Each query head has its unrotated elements, then its rotated ones. The native network has the unrotated elements of
  all heads, then the rotated ones of all heads.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

from llm_serving.models.latent_attention import LATENT_EPS, Transposed
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheShape
from llm_serving.network.operations import Operation, Weight
from llm_serving.network.quantization import is_latent
from llm_serving.network.weights import shared_order

_VALUES: Final = 512
"""Elements of a key that are its value: a constant of the class (`pa_mla_v_dim`)."""
_OF_LATENTS: Final = re.compile(r"model\.layers\.(\d+)\.self_attn\.(q_proj|q_a_proj|q_b_proj|kv_\w+_proj\w*)\.weight")
_STORED: Final = {"q_b_proj": "linear_q_up_proj", "q_proj": "linear_q_proj"}


def latent_attentions(network: Network) -> list[Operation]:
    return [each for each in network.operations if is_latent(each)]


def is_of_latent_attention(operation: Operation) -> bool:
    """Return whether an operation is latent attention or one of its products with a matrix for each head."""
    return is_latent(operation) or _projection(operation) == "kv_b_proj"


def _projection(operation: Operation) -> str | None:
    """Return which projection of latent attention a product is, such as "q_b_proj", or None if it is none."""
    found = _OF_LATENTS.fullmatch(operation.weights["weight"].names[0]) if operation.kind == "linear" else None
    return None if found is None else found[2]


def joined_caches(network: Network) -> list[CacheShape]:
    """Return the caches of a network, with the latent vector and the rotary key of a token in one tensor."""
    caches = list(network.caches)
    for each in latent_attentions(network):
        layer = each.attributes["layer"]
        caches[layer] = CacheShape(1, caches[layer].key_width + caches[layer].value_width, 0)
    return caches


def unsupported_latent_attention(network: Network) -> str | None:
    products = [each.weights["weight"] for each in network.operations if _projection(each) == "kv_b_proj"]
    ranks = {weight.shape[1] for weight in products if weight.transform is None}
    if ranks != {_VALUES}:
        return f"has latent vectors of {_VALUES} elements; those of the model have {min(ranks)}"
    if {each.attributes["eps"] for each in network.operations if each.kind == "rms_norm"} - {LATENT_EPS}:
        return f"normalises latent vectors with rms_norm_eps, and the model with {LATENT_EPS}"
    return None


def with_latent_weights(network: Network, *, transposed_values: bool = False) -> Network:
    """Return a network with the weights of MindFormers' class for latent attention. It serves only to read them.

    The weights that map queries to latent vectors, and latent vectors to values, have a matrix for each head and are
    read like weights of experts. `transposed_values`: transpose the matrices for values, as BatchMatMul takes them.
    """
    if not latent_attentions(network):
        return network
    operations: list[Operation] = []
    layer: dict[str, Operation] = {}
    for each in network.operations:
        projection = _projection(each)
        if projection is None:
            operations.append(each)
        elif projection in layer:  # the second product with kv_b_proj, the last one of a layer
            operations += _of_layer(layer, each, network, transposed_values=transposed_values)
            layer = {}
        else:
            layer[projection] = each
    return network.changed(operations=operations)


def _of_layer(
    layer: dict[str, Operation], values: Operation, network: Network, *, transposed_values: bool
) -> list[Operation]:
    """Return one layer's products as MindFormers computes them. `values`: the product that maps latents to values."""
    keys, down = layer["kv_b_proj"], layer["kv_a_proj_with_mqa"]
    queries = layer.get("q_b_proj") or layer["q_proj"]
    heads, of_keys, of_values = keys.attributes["heads"], keys.weights["weight"], values.weights["weight"]
    if transposed_values:
        size = of_values.shape[0] // heads
        shape = heads * of_values.shape[1], size
        of_values = replace(of_values, shape=shape, transform=Transposed(size))
    absorbed = replace(
        keys, kind="experts", weights={"gate_up": of_keys, "down": of_values}, attributes={"experts": heads}
    )
    joined = down.weights["weight"]
    if "q_a_proj" in layer:
        joined = _stacked(joined, layer["q_a_proj"].weights["weight"])
    by_head = _by_head(queries.weights["weight"], heads, of_keys.shape[1])
    return [replace(down, weights={"weight": joined}), replace(queries, weights={"weight": by_head}), absorbed]


def _order(weight: Weight) -> tuple[int, ...]:
    return weight.rows or tuple(range(weight.shape[0]))


def _stacked(first: Weight, second: Weight) -> Weight:
    num_stored = sum(math.prod(shape[:-1]) for shape in first.stored_shapes)
    order = (*_order(first), *(num_stored + row for row in _order(second)))
    return replace(
        first,
        names=(*first.names, *second.names),
        shape=(len(order), first.shape[1]),
        stored_shapes=(*first.stored_shapes, *second.stored_shapes),
        rows=shared_order(order),
    )


def _by_head(weight: Weight, heads: int, still: int) -> Weight:
    """Reorder rows by head: `still` unrotated, then the rotated. `weight` has the unrotated rows of all heads first."""
    rows = _order(weight)
    rotated = rows[heads * still :]
    wide = len(rotated) // heads
    order = [
        row
        for head in range(heads)
        for row in (*rows[head * still : (head + 1) * still], *rotated[head * wide : (head + 1) * wide])
    ]
    return replace(weight, rows=shared_order(tuple(order)))


def latent_parameter(weight: Weight) -> str | None:
    """Return the path of a weight of latent attention in MindFormers' class, or None for any other weight."""
    found = _OF_LATENTS.fullmatch(weight.names[0])
    if found is None or (found[2] == "q_proj" and len(weight.names) > 1):
        return None
    at = f"decoder.layers.{found[1]}.self_attention."
    if found[2] == "kv_b_proj":
        return at + ("q_absorb" if _order(weight)[0] == 0 else "out_absorb")
    if found[2] == "kv_a_proj_with_mqa":
        return f"{at}linear_{'qkv' if len(weight.names) > 1 else 'kv'}_down_proj.weight"
    return f"{at}{_STORED[found[2]]}.weight"
