"""The Llama family: Llama 2 and 3 in every size, and models of the same shape.

Grouped queries or not, tied embeddings or not, biases or not, scaled rotary embedding or not: `ModelSpec` says.
"""

from __future__ import annotations

from llm_serving.backends.base import Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.models.base import KVCaches
from llm_serving.models.llama_operations import LlamaOfOperations
from llm_serving.models.llama_together import LlamaTogether
from llm_serving.models.llama_weights import LlamaWeights
from llm_serving.models.weights import WeightReader


def llama(
    spec: ModelSpec, backend: Backend, reader: WeightReader, kv_caches: KVCaches, max_positions: int
) -> LlamaOfOperations | LlamaTogether:
    """A `models.base.ModelFamily`: one operation where the backend has it, otherwise made of its operations."""
    operation = backend.decoder(
        spec.num_hidden_layers,
        spec.head_dim**-0.5,
        spec.rms_norm_eps,
        attention_bias=spec.attention_bias,
        mlp_bias=spec.mlp_bias,
    )
    weights = LlamaWeights(spec, backend, reader)
    if operation is None:
        return LlamaOfOperations(spec, backend, weights, kv_caches, max_positions)
    return LlamaTogether(spec, backend, operation, weights, kv_caches, max_positions)
