"""MindFormers' own network of a model as a Cell with the arguments, the cache and the weights of this server.

MindFormers builds it; nothing in it is replaced but its Parameters and the tables of its rotary embedding.
PagedAttention with the lengths of queries computes prompts, chunks and decoding alike, as in the native network, so
that a neighbour changes no bit. The head is ours, of the same weight: it multiplies the rows that give a result only,
and on a CPU it does not round its sums.

Stand-ins for packages that MindFormers imports, that its networks never call, and that are not installed.

`import mindformers` imports all of it: data sets, metrics, training. What those parts import from elsewhere is large
(`datasets`, `pyarrow`), or is at no package index (`hyper_parallel`, which runs its distributed training). While
`stand_ins` lasts, the import of a package named here that is missing gives an empty module; one that is installed is
imported as ever, and any other that is missing fails as ever.

Modules of MindFormers, imported without what its networks never call, and without its log files.

MindFormers' `LlamaForCausalLM`, that of its releases before 2, as a Cell with the arguments of this server.

Its way to decode in parallel takes packed rows with a length for each request, a mask and positions: PagedAttention
then computes prompts, chunks and decoding alike. Each of its layers has a cache of its own, whose place ours takes.
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
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import mindspore as ms
from mindspore import nn, ops

from llm_serving.backends.base import Backend
from llm_serving.errors import KernelError, ModelError
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step_inputs import KVCaches
from llm_serving.models.layers import heads_of
from llm_serving.models.mindformers import CLASSES, lacking_in_llama, lacking_in_mindformers, place_in_llama, place_of
from llm_serving.models.model_config import Facts
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.network.builder import Network

NEVER_CALLED: Final = frozenset(
    {"datasets", "hyper_parallel", "jieba", "mindpet", "pyarrow", "rouge_chinese", "tensorboardX"}
)
"""Of MindFormers 2.1: data sets and their files, metrics of training, parallel training, fine-tuning, its curves."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """While it lasts, packages of `NEVER_CALLED` that are missing can be imported. They stay in `sys.modules`."""
    finder = _Finder()
    sys.meta_path.append(finder)  # the last one asked: of packages that nobody else finds
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Absent:
    """Whatever is taken out of such a module: a decorator, a function that is called while modules are imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Absent:
        return self

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # By their names, classes: others inherit from them.
        return type(name, (_Absent,), {"__module__": self.__name__}) if name[0].isupper() else _Absent()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_named = fullname.partition(".")[0] in NEVER_CALLED
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_named else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


INSTALL: Final = "scripts/install_mindformers.sh"
_PACKAGE: Final = "mindformers"


def mindformers_version() -> str:
    """Of the package that is installed.

    Raises:
        KernelError: It cannot be imported.
    """
    return str(module_of_mindformers(_PACKAGE).__version__)


@functools.cache
def module_of_mindformers(module: str) -> Any:
    """A module of MindFormers.

    Raises:
        KernelError: It, or a package that it needs, is not installed.
    """
    try:
        with stand_ins():
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


def silently() -> contextlib.redirect_stdout[io.StringIO]:
    """While it builds a network MindFormers prints a table of all that its configuration says."""
    return contextlib.redirect_stdout(io.StringIO())


def put(network: nn.Cell, place: str, value: Any) -> None:
    """Sets an attribute of a Cell within another, `layers.0.attention.weight`."""
    *path, attribute = place.split(".")
    cell: Any = network
    for name in path:
        cell = cell[int(name)] if name.isdecimal() else getattr(cell, name)
    setattr(cell, attribute, value)


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
        self.model = _build(spec, backend, max_positions)
        _set_weights(self.model, spec.network, parameters)
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


def _build(spec: ModelSpec, backend: Backend, max_positions: int) -> nn.Cell:
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


def _set_weights(model: nn.Cell, network: Network, parameters: Parameters) -> None:
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
        self.model = _build_legacy(spec, backend, max_positions, kv_caches[0][0].shape[1])
        _set_legacy_weights(self.model, network, parameters, kv_caches)
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


def _build_legacy(spec: ModelSpec, backend: Backend, max_positions: int, block_size: int) -> nn.Cell:
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


def _set_legacy_weights(model: nn.Cell, network: Network, parameters: Parameters, kv_caches: KVCaches) -> None:
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
