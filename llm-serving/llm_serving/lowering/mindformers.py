"""MindFormers' own network of a model as a Cell with the arguments, the cache and the weights of this server.

MindFormers builds it; nothing in it is replaced but its Parameters and the tables of its rotary embedding.
PagedAttention with the lengths of queries computes prompts, chunks and decoding alike, as in the native network, so
that a neighbour changes no bit. The head is ours, of the same weight: it multiplies the rows that give a result only,
and on a CPU it does not round its sums.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any, Final

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.errors import KernelError, ModelError
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.stand_ins import stand_ins
from llm_serving.lowering.step import KVCaches
from llm_serving.models.facts import Facts
from llm_serving.models.mindformers_classes import CLASSES, lacking_in_mindformers, place_of
from llm_serving.models.parts import heads_of
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.network.description import Network

INSTALL: Final = "scripts/install_mindformers.sh"
_PACKAGE: Final = "mindformers"


def mindformers_version() -> str:
    """Of the package that is installed.

    Raises:
        KernelError: It cannot be imported.
    """
    return str(_import(_PACKAGE).__version__)


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
    make_config = getattr(_import(classes.config_module), classes.config)
    make_network = getattr(_import(classes.module), classes.network)
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
            *path, attribute = place.split(".")
            cell: Any = model
            for name in path:
                cell = cell[int(name)] if name.isdecimal() else getattr(cell, name)
            setattr(cell, attribute, parameter)
    (model.output_layer.weight,) = parameters[network.head.weights["weight"]]
    ours = {id(each) for made in parameters.values() for each in made}
    others = [each.name for each in model.get_parameters() if id(each) not in ours]
    if others:
        raise ModelError(f"MindFormers' network has weights that the model has not: {', '.join(others[:4])}")


@functools.cache
def _import(module: str) -> Any:
    """A module of MindFormers.

    Raises:
        KernelError: It, or a package that it needs, is not installed.
    """
    try:
        with stand_ins():
            if module != _PACKAGE:
                _import(_PACKAGE)
                return importlib.import_module(module)
            with tempfile.TemporaryDirectory(prefix="mindformers_log_") as folder:
                os.environ.setdefault("RUN_MODE", "predict")
                os.environ.setdefault("LOG_MF_PATH", folder)
                package = importlib.import_module(module)
                _quieten(importlib.import_module("mindformers.tools.logger").get_logger())
            return package
    except ImportError as error:
        raise KernelError(
            f"model_config.implementation: mindformers needs MindFormers 2.1 and what it imports, and {INSTALL} "
            f"installs them: {error}"
        ) from None


def _quieten(mindformers_logger: logging.Logger) -> None:
    """It writes files of its own, and every layer that it builds, to the standard output."""
    mindformers_logger.setLevel(logging.WARNING)
    for handler in list(mindformers_logger.handlers):
        if isinstance(handler, logging.FileHandler):
            mindformers_logger.removeHandler(handler)
            handler.close()
