"""MindFormers' own networks as Cells with the step inputs, KV cache and weights of this server.

Only the Parameters and the rotary tables of a MindFormers network are replaced. PagedAttention with query lengths
computes prompts, chunks and decode steps alike, so other requests change no bit of an answer. The LM head is the native
one: it multiplies only the sampled rows, and keeps float32 sums on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import io
import logging
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import mindspore as ms
from mindspore import nn, ops

from llm_serving.backends.base import Backend
from llm_serving.errors import KernelError, ModelError
from llm_serving.lowering import operators_for_cpu
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step_inputs import KVCaches
from llm_serving.models.attention import attention_heads
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.mindformers import (
    MINDFORMERS_CLASSES,
    mindformers_llama_parameter,
    mindformers_parameter,
    unsupported_by_mindformers,
    unsupported_by_mindformers_llama,
    without_key_offsets,
)
from llm_serving.models.mindformers_arguments import config_arguments
from llm_serving.models.mindformers_latent import latent_attentions, with_latent_weights
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.network.builder import Network

NEVER_CALLED: Final = frozenset(
    {"datasets", "hyper_parallel", "jieba", "mindpet", "pyarrow", "rouge_chinese", "tensorboardX"}
)
"""Packages that MindFormers 2.1 imports but its networks never call."""


@contextmanager
def import_stubs() -> Iterator[None]:
    """Return a context in which missing packages of `NEVER_CALLED` import as stubs. The stubs stay in `sys.modules`."""
    finder = _StubFinder()
    sys.meta_path.append(finder)  # at the end, so that it gets only packages that no other finder has
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _StubAttribute:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _StubAttribute:
        return self

    def __getattr__(self, name: str) -> _StubAttribute:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A capitalized name is a class, which other classes may inherit.
        return type(name, (_StubAttribute,), {"__module__": self.__name__}) if name[0].isupper() else _StubAttribute()


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_named = fullname.partition(".")[0] in NEVER_CALLED
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_named else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


INSTALL: Final = "scripts/install_mindformers.sh"
_PACKAGE: Final = "mindformers"


def mindformers_version() -> str:
    return str(module_of_mindformers(_PACKAGE).__version__)


@functools.cache
def module_of_mindformers(module: str) -> Any:
    """Import a module of MindFormers. Raise KernelError if the module or one of its dependencies is missing."""
    try:
        with import_stubs():
            if module != _PACKAGE:
                module_of_mindformers(_PACKAGE)
                return importlib.import_module(module)
            with tempfile.TemporaryDirectory(prefix="mindformers_log_") as folder:
                os.environ.setdefault("RUN_MODE", "predict")
                os.environ.setdefault("LOG_MF_PATH", folder)
                package = importlib.import_module(module)
                _quieten(importlib.import_module("mindformers.tools.logger").get_logger())
            return package
    except ImportError as error:
        raise KernelError(
            f"model_config.implementation: mindformers needs MindFormers 2.1 and its dependencies, which {INSTALL} "
            f"installs: {error}"
        ) from None


def _quieten(mindformers_logger: logging.Logger) -> None:
    mindformers_logger.setLevel(logging.WARNING)
    for handler in list(mindformers_logger.handlers):
        if isinstance(handler, logging.FileHandler):
            mindformers_logger.removeHandler(handler)
            handler.close()


def set_parameter(network: nn.Cell, path: str, value: Any) -> None:
    *names, attribute = path.split(".")
    cell: Any = network
    for name in names:
        cell = cell[int(name)] if name.isdecimal() else getattr(cell, name)
    setattr(cell, attribute, value)


def network_to_read(network: Network, backend: Backend) -> Network:
    """Return a copy of `network` with the weights in MindFormers' layout, so that they are read in this layout."""
    return with_latent_weights(without_key_offsets(network), transposed_values=backend.name != "cpu")


class MindFormersNetwork(nn.Cell):
    """Computes the input of the LM head for the sampled rows, from `lowering.step_inputs.STEP_INPUTS`. `read`: result
    of `network_to_read`. Raise KernelError without MindFormers or the operator library, ModelError if MindFormers has
    no class for the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        read: Network,
        backend: Backend,
        parameters: Parameters,
        kv_caches: KVCaches,
        max_positions: int,
    ) -> None:
        super().__init__()
        _check(unsupported_by_mindformers(spec.architecture, spec.network, max_positions), backend)
        self.model = _build(spec, backend, max_positions)
        _set_weights(self.model, read, parameters)
        self.attention_mask = backend.attention_mask(max_positions, kv_caches[0][0].shape[1])
        self.embedding = backend.embedding()
        self.key_caches = ms.ParameterTuple([keys for keys, _ in kv_caches])
        # Without values of their own, keys hold them.
        values = [values for _, values in kv_caches]
        self.value_caches = ms.ParameterTuple(values) if all(each.shape[-1] for each in values) else None

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
            batch_valid_length=batch_valid_length,
            q_seq_lens=q_seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            attention_mask=self.attention_mask(positions, block_tables),
            key_cache=self.key_caches,
            value_cache=self.value_caches,
        )
        return self.embedding(sample_indices, hidden).astype(ms.float32)


def _check(lacks: str | None, backend: Backend) -> None:
    if lacks is not None:
        raise ModelError(lacks)
    if backend.name == "plain":
        raise KernelError("MindFormers' network needs `kernels: primitives`, because MindSpore has no PagedAttention")


def _build(spec: ModelSpec, backend: Backend, max_positions: int) -> nn.Cell:
    classes = MINDFORMERS_CLASSES[spec.architecture]
    names = classes.config, classes.network
    make_config, make_network = (getattr(module_of_mindformers(module), name) for module, name in names)
    if backend.name == "cpu":
        for module, replaced in operators_for_cpu.REPLACED.items():
            vars(module_of_mindformers(module)).update(replaced)
    with contextlib.redirect_stdout(io.StringIO()):  # MindFormers prints a table while it builds a network
        network = make_network(make_config(**config_arguments(spec, backend.dtype, max_positions)))
    network.add_flags_custom_mcore(is_prefill=False)  # PagedAttention in every step
    model: nn.Cell = network.model
    if latent_attentions(spec.network):
        _prepare_latent_attention(model, backend)
    model.return_hidden_states = True
    model.move_lens_to_cpu = False  # Ascend's attention finds lengths by the names of the graph's parameters
    return model


def _prepare_latent_attention(model: nn.Cell, backend: Backend) -> None:
    for layer in model.decoder.layers:
        attention = layer.self_attention
        del attention.linear_kv_up_proj  # PagedAttention reads latent vectors, which no step expands
        if backend.name == "cpu":
            products = operators_for_cpu.HeadProducts(attention.num_attention_heads)
            attention.q_no_pe_batch_matmul = attention.out_absorb_matmul = products


_EXPERTS: Final = re.compile(r"linear_fc([12])\.weight")


def _set_weights(model: nn.Cell, network: Network, parameters: Parameters) -> None:
    for operation in network.operations:
        for role, weight in operation.weights.items():
            (parameter,) = parameters[weight]
            if weight.generate is not None:
                setattr(model.rotary_pos_emb, f"{role}_cache", parameter)
                continue
            path = mindformers_parameter(weight)
            assert path is not None  # guaranteed by `unsupported_by_mindformers`
            set_parameter(model, path, parameter)
            if operation.kind == "experts":  # MindFormers has two names for weights of experts
                set_parameter(model, _EXPERTS.sub(r"weight\1", path), parameter)
    (model.output_layer.weight,) = parameters[network.head.weights["weight"]]
    check_no_own_parameters(model, [each for made in parameters.values() for each in made])


def check_no_own_parameters(model: nn.Cell, ours: Iterable[ms.Parameter]) -> None:
    """Raise ModelError if a network of MindFormers computes with Parameters that it created itself."""
    known = {id(each) for each in ours}
    unknown = [each.name for each in model.get_parameters() if id(each) not in known]
    if unknown:
        raise ModelError(f"MindFormers' network has weights that the model lacks: {', '.join(unknown[:4])}")


_CACHES = "layers.{}.attention.infer_attention.paged_attention_mgr.{}_cache"


class MindFormersLlamaNetwork(nn.Cell):
    """Computes the same as `MindFormersNetwork`, but with `LlamaForCausalLM` of MindFormers before release 2.

    The class runs in its mode for parallel decoding, which accepts rows of several requests in one sequence. `network`:
    result of `models.mindformers.split_stacked_weights`.
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
        _check(unsupported_by_mindformers_llama(spec.architecture, spec.network, max_positions), backend)
        self.model = _build_legacy(spec, backend, max_positions, kv_caches[0][0].shape[1])
        _set_legacy_weights(self.model, network, parameters, kv_caches)
        self.attention_mask = backend.attention_mask(max_positions, kv_caches[0][0].shape[1])
        self.embedding = backend.embedding()
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
            batch_valid_length=batch_valid_length,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            attention_mask=self.attention_mask(positions, block_tables),
            position_ids=positions,
            q_seq_lens=q_seq_lens,
        )
        return self.embedding(sample_indices, self.reshape(hidden, (-1, self.hidden))).astype(ms.float32)


def _build_legacy(spec: ModelSpec, backend: Backend, max_positions: int, block_size: int) -> nn.Cell:
    make_config = module_of_mindformers("mindformers.models.llama.llama_config").LlamaConfig
    make_network = module_of_mindformers("mindformers.models.llama.llama").LlamaForCausalLM
    c = ConfigReader(spec.config, CONFIG_NAME)
    heads = attention_heads(c)
    names = [name for weight in spec.network.weights for name in weight.names]
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
            qkv_has_bias=any(name.endswith("self_attn.q_proj.bias") for name in names),
            attn_proj_has_bias=any(name.endswith("self_attn.o_proj.bias") for name in names),
            block_size=block_size,
            num_blocks=1,
            use_past=True,
            is_dynamic=True,
            use_flash_attention=True,
            # Any mode works: PagedAttention gets the mask and the query lengths.
            parallel_decoding_params={"parallel_decoding": "la"},
            **dict.fromkeys(types, backend.dtype),
        )
    )
    network.add_flags_custom(is_first_iteration=False)  # PagedAttention in every step
    model: nn.Cell = network.model
    return model


def _set_legacy_weights(model: nn.Cell, network: Network, parameters: Parameters, kv_caches: KVCaches) -> None:
    for operation in network.operations[:-1]:
        for role, weight in operation.weights.items():
            (parameter,) = parameters[weight]
            if weight.generate is not None:
                setattr(model.freqs_mgr, f"freqs_{role}", parameter)
                continue
            path = mindformers_llama_parameter(weight.names[0])
            assert path is not None  # guaranteed by `unsupported_by_mindformers_llama`
            set_parameter(model, path, parameter)
    for layer, pair in enumerate(kv_caches):
        for part, cache in zip(("key", "value"), pair, strict=True):
            set_parameter(model, _CACHES.format(layer, part), cache)
    made = [each for parameters_of_weight in parameters.values() for each in parameters_of_weight]
    check_no_own_parameters(model, [*made, *(cache for pair in kv_caches for cache in pair)])
