"""The Llama family: Llama 2 and 3 in every size, and models of the same shape.

Grouped queries or not, tied embeddings or not, biases or not, scaled rotary embedding or not: `ModelSpec` says.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.embedding import Embedding
from llm_serving.layers.rotary import RotaryTables
from llm_serving.models.base import KVCaches
from llm_serving.models.llama_layers import llama_layers
from llm_serving.models.weights import WeightReader


class LlamaForCausalLM(nn.Cell):
    """A `models.base.ModelFamily`."""

    def __init__(
        self, spec: ModelSpec, backend: Backend, weights: WeightReader, kv_caches: KVCaches, max_positions: int
    ) -> None:
        super().__init__()
        self.spec = spec
        table_shape = (spec.vocab_size, spec.hidden_size)
        embed_tokens = weights.take("model.embed_tokens.weight", table_shape)
        # A tied table is a factor of the last product as well; look-ups accept that order of elements.
        table = backend.linear_weight(embed_tokens) if spec.tie_word_embeddings else backend.table(embed_tokens)
        self.embedding = Embedding(backend, table)
        self.rotary_tables = RotaryTables(backend, spec, max_positions)
        self.layers = llama_layers(spec, backend, weights, kv_caches)
        if spec.tie_word_embeddings:
            self.head = table
            if "lm_head.weight" in weights:  # some exporters write the table twice
                weights.take("lm_head.weight", table_shape)
        else:
            self.head = backend.linear_weight(weights.take("lm_head.weight", table_shape))
        self.logits = backend.logits()
        weights.check_all_taken()

    def use_whole_prompts(self, backend: AscendBackend) -> None:
        """Makes the graph compiled next, under a `phase` of its own, one for steps of whole prompts only.

        It shares every weight with the graph compiled before. B is fixed in it; unused rows have length 0.
        """
        self.layers.use_whole_prompts(backend)

    def construct(
        self,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        hidden = self.embedding(token_ids)
        cos, sin = self.rotary_tables(positions)
        step = slot_mapping, block_tables, query_lens, context_lens, sample_indices
        return self.logits(self.layers(hidden, cos, sin, *step), self.head)
