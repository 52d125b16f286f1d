"""MindFormers' own network of a model as a Cell with the arguments, the cache and the weights of this server.

MindFormers builds it; nothing in it is replaced but its Parameters and the tables of its rotary embedding.
PagedAttention with the lengths of queries computes prompts, chunks and decoding alike, as in the native network, so
that a neighbour changes no bit. The head is ours, of the same weight: it multiplies the rows that give a result only,
and on a CPU it does not round its sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.errors import KernelError, ModelError
from llm_serving.lowering.mindformers_package import module_of_mindformers, put, silently
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step import KVCaches
from llm_serving.models.facts import Facts
from llm_serving.models.mindformers_classes import CLASSES, lacking_in_mindformers, place_of
from llm_serving.models.parts import heads_of
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.network.description import Network


class NetworkOfMindFormers(nn.Cell):
    """The arguments of a step (`lowering.step.STEP_INPUTS`) -> what the head reads of the rows that give a result.

    Args:
        spec: The model.
        backend: Whose operators compute it.
        parameters: Of every weight, as for a graph of Cells.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens.

    Raises:
        KernelError: MindFormers is not installed, or the operator library is not there.
        ModelError: It has no class for the model.
    """

    def __init__(
        self, spec: ModelSpec, backend: Backend, parameters: Parameters, kv_caches: KVCaches, max_positions: int
    ) -> None:
        super().__init__()
        lacks = lacking_in_mindformers(spec.architecture, spec.network, max_positions)
        if lacks is not None:
            raise ModelError(lacks)
        if backend.name == "plain":
            raise KernelError("MindFormers' network needs kernels: primitives: MindSpore itself has no PagedAttention")
        self.model = _built(spec, backend, max_positions)
        _place(self.model, spec.network, parameters)
        self.seen = backend.seen(max_positions, kv_caches[0][0].shape[1])
        self.lengths = backend.lengths()
        self.look_up = backend.embedding()
        self.key_caches = ms.ParameterTuple([keys for keys, _ in kv_caches])
        self.value_caches = ms.ParameterTuple([values for _, values in kv_caches])

    def construct(
        self,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        q_seq_lens: ms.Tensor,
        batch_valid_length: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        hidden = self.model(
            input_ids=token_ids,
            positions=positions,
            batch_valid_length=self.lengths(batch_valid_length),
            q_seq_lens=self.lengths(q_seq_lens),
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            attention_mask=self.seen(positions, block_tables),
            key_cache=self.key_caches,
            value_cache=self.value_caches,
        )
        return self.look_up(sample_indices, hidden).astype(ms.float32)


def _built(spec: ModelSpec, backend: Backend, max_positions: int) -> nn.Cell:
    """The `GPTModel` of MindFormers' class, with Parameters of its own."""
    classes = CLASSES[spec.architecture]
    make_config = getattr(module_of_mindformers(classes.config_module), classes.config)
    make_network = getattr(module_of_mindformers(classes.module), classes.network)
    with silently():
        network = make_network(make_config(**_facts(spec, backend.dtype, max_positions)))
    network.add_flags_custom_mcore(is_prefill=False)  # PagedAttention, whatever the step
    model: nn.Cell = network.model
    model.return_hidden_states = True
    model.move_lens_to_cpu = False  # `Backend.lengths` has done so
    return model


def _facts(spec: ModelSpec, dtype: str, max_positions: int) -> Mapping[str, Any]:
    """Arguments of a configuration of MindFormers."""
    c = Facts(spec.config, CONFIG_NAME)
    heads = heads_of(c)
    has_bias = any("bias" in each.weights for each in spec.network.operations if each.kind == "linear")
    types = ("params_dtype", "compute_dtype", "layernorm_compute_dtype", "rotary_dtype")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.network.hidden,
        "intermediate_size": c.integer("intermediate_size"),
        "num_hidden_layers": len(spec.caches),
        "num_attention_heads": heads.q,
        "num_key_value_heads": heads.kv,
        "head_dim": heads.own,
        "rms_norm_eps": c.number("rms_norm_eps", 1e-6),
        "hidden_act": "silu",
        "attention_bias": has_bias,
        "tie_word_embeddings": c.boolean("tie_word_embeddings"),
        # Its tables of cosines and sines are replaced by ours, which know of every stretching.
        "position_embedding_type": "rope",
        "max_position_embeddings": max_positions,
        "use_flash_attention": True,
        "softmax_compute_dtype": "float32",
        **dict.fromkeys(types, dtype),
        **CLASSES[spec.architecture].facts,
    }


def _place(model: nn.Cell, network: Network, parameters: Parameters) -> None:
    """Puts our Parameters in the place of those MindFormers made.

    Raises:
        ModelError: One of its Parameters has no weight of the model.
    """
    for operation in network.operations:
        for role, weight in operation.weights.items():
            (parameter,) = parameters[weight]
            if weight.made is not None:
                setattr(model.rotary_pos_emb, f"{role}_cache", parameter)
                continue
            place = place_of(weight)
            assert place is not None  # `lacking_in_mindformers` has looked
            put(model, place, parameter)
    (model.output_layer.weight,) = parameters[network.head.weights["weight"]]
    check_no_others(model, [each for made in parameters.values() for each in made])


def check_no_others(model: nn.Cell, ours: Iterable[ms.Parameter]) -> None:
    """Refuses a network of MindFormers that computes with Parameters of its own.

    Raises:
        ModelError: It has some.
    """
    known = {id(each) for each in ours}
    others = [each.name for each in model.get_parameters() if id(each) not in known]
    if others:
        raise ModelError(f"MindFormers' network has weights that the model has not: {', '.join(others[:4])}")
