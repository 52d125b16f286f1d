"""MindFormers' `LlamaForCausalLM`, that of its releases before 2, as a Cell with the arguments of this server.

Its way to decode in parallel takes packed rows with a length for each request, a mask and positions: PagedAttention
then computes prompts, chunks and decoding alike. Each of its layers has a cache of its own, whose place ours takes.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from llm_serving.backends.base import Backend
from llm_serving.errors import KernelError, ModelError
from llm_serving.lowering.mindformers import check_no_others
from llm_serving.lowering.mindformers_package import module_of_mindformers, put
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step import KVCaches
from llm_serving.models.facts import Facts
from llm_serving.models.mindformers_llama import lacking_in_llama, place_in_llama
from llm_serving.models.parts import heads_of
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.network.description import Network

_CACHES = "layers.{}.attention.infer_attention.paged_attention_mgr.{}_cache"


class NetworkOfMindFormersLlama(nn.Cell):
    """The arguments of a step (`lowering.step.STEP_INPUTS`) -> what the head reads of the rows that give a result.

    Args:
        spec: The model.
        network: Of the model, its stacked weights apart (`models.mindformers_llama.unstacked`).
        backend: Whose operators compute it.
        parameters: Of every weight of `network`, as for a graph of Cells.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens.

    Raises:
        KernelError: MindFormers is not installed, or the operator library is not there.
        ModelError: Its class does not compute the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        network: Network,
        backend: Backend,
        parameters: Parameters,
        kv_caches: KVCaches,
        max_positions: int,
    ) -> None:
        super().__init__()
        lacks = lacking_in_llama(spec.architecture, spec.network, max_positions)
        if lacks is not None:
            raise ModelError(lacks)
        if backend.name == "plain":
            raise KernelError("MindFormers' network needs kernels: primitives: MindSpore itself has no PagedAttention")
        self.model = _built(spec, backend, max_positions, kv_caches[0][0].shape[1])
        _place(self.model, network, parameters, kv_caches)
        self.seen = backend.seen(max_positions, kv_caches[0][0].shape[1])
        self.lengths = backend.lengths()
        self.look_up = backend.embedding()
        self.reshape = ops.Reshape()
        self.hidden = network.hidden

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
            self.reshape(token_ids, (1, -1)),
            batch_valid_length=self.lengths(batch_valid_length),
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            attention_mask=self.seen(positions, block_tables),
            position_ids=positions,
            q_seq_lens=self.lengths(q_seq_lens),
        )
        return self.look_up(sample_indices, self.reshape(hidden, (-1, self.hidden))).astype(ms.float32)


def _built(spec: ModelSpec, backend: Backend, max_positions: int, block_size: int) -> nn.Cell:
    """The `LlamaModel` inside the class, with Parameters of its own and caches of a block."""
    make_config = module_of_mindformers("mindformers.models.llama.llama_config").LlamaConfig
    make_network = module_of_mindformers("mindformers.models.llama.llama").LlamaForCausalLM
    c = Facts(spec.config, CONFIG_NAME)
    heads = heads_of(c)
    types = ("compute_dtype", "layernorm_compute_type", "rotary_dtype", "param_init_type")
    network = make_network(
        make_config(
            seq_length=max_positions,
            max_position_embedding=max_positions,
            hidden_size=spec.network.hidden,
            intermediate_size=c.integer("intermediate_size"),
            num_layers=len(spec.caches),
            num_heads=heads.q,
            n_kv_heads=heads.kv,
            vocab_size=spec.vocab_size,
            rms_norm_eps=c.number("rms_norm_eps", 1e-6),
            qkv_has_bias=any(_is_bias(name, "self_attn.q_proj") for name in _names(spec.network)),
            attn_proj_has_bias=any(_is_bias(name, "self_attn.o_proj") for name in _names(spec.network)),
            block_size=block_size,
            num_blocks=1,
            use_past=True,
            is_dynamic=True,
            use_flash_attention=True,
            # Any: PagedAttention has the mask and the lengths of queries.
            parallel_decoding_params={"parallel_decoding": "la"},
            **dict.fromkeys(types, backend.dtype),
        )
    )
    network.add_flags_custom(is_first_iteration=False)  # PagedAttention, whatever the step
    model: nn.Cell = network.model
    return model


def _names(network: Network) -> list[str]:
    return [name for weight in network.weights for name in weight.names]


def _is_bias(name: str, of: str) -> bool:
    return name.endswith(f"{of}.bias")


def _place(model: nn.Cell, network: Network, parameters: Parameters, kv_caches: KVCaches) -> None:
    """Puts our Parameters and caches in the place of those MindFormers made."""
    for operation in network.operations[:-1]:
        for role, weight in operation.weights.items():
            (parameter,) = parameters[weight]
            if weight.made is not None:
                setattr(model.freqs_mgr, f"freqs_{role}", parameter)
                continue
            place = place_in_llama(weight.names[0])
            assert place is not None  # `lacking_in_llama` has looked
            put(model, place, parameter)
    for layer, pair in enumerate(kv_caches):
        for part, cache in zip(("key", "value"), pair, strict=True):
            put(model, _CACHES.format(layer, part), cache)
    made = [each for parameters_of_weight in parameters.values() for each in parameters_of_weight]
    check_no_others(model, [*made, *(cache for pair in kv_caches for cache in pair)])
