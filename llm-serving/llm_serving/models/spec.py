"""The model spec, read from `config.json`, a GGUF file or a MindFormers YAML before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_json, read_json_object
from llm_serving.core.window import LayerWindow
from llm_serving.errors import ModelError
from llm_serving.formats.folder import how_to_convert
from llm_serving.formats.packed import Scheme
from llm_serving.formats.quantization_schemes import scheme_of
from llm_serving.models import chatglm
from llm_serving.models.config_reader import TEXT_CONFIG, ConfigReader
from llm_serving.models.gguf import is_gguf, read_config
from llm_serving.models.layers import SCORE_TOKENS, SEPARATE_EXPERT
from llm_serving.models.mindformers import config_from_mindformers
from llm_serving.models.mindformers_latent import joined_caches
from llm_serving.models.pooling import is_embedding_model, max_seq_length, score_tokens
from llm_serving.models.registry import architecture_of, describe
from llm_serving.network.adapters import AdaptedLinear, with_adapters
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheLayout, CacheShape, StateShape, grouped, ungrouped
from llm_serving.network.rope import Rotary, Scaling
from llm_serving.network.sharding import sharded

CONFIG_NAME: Final = "config.json"
MAX_CONFIG_BYTES: Final = 2**20
MAX_VOCAB_SIZE: Final = 2**20
"""Maximum vocabulary size for which the sampler sums the probabilities exactly."""

_QUANTIZATION_FILES: Final[Mapping[str, str]] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""File of an older quantization tool -> its method, for folders whose config.json does not mention quantization."""

_MATRICES: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("weight",),
    "route": ("weight",),
    "experts": ("gate_up", "down"),
}
"""Operation kind -> its weights that are matrices, by which each token is multiplied."""
_UNLIMITED: Final = 2**20
_MAX_TOKENIZER_CONFIG_BYTES: Final = 2**26
_MAX_POSITIONS: Final = 2**31 - 1


@dataclass(frozen=True)
class ModelSpec:
    """Describes a model before its weights are read.

    `max_position_embeddings`: longest trained context, in tokens. `eos_token_ids`: all token ids that end a text.
    """

    architecture: str
    config: Mapping[str, Any]
    network: Network = field(repr=False, compare=False)
    scheme: Scheme | None
    vocab_size: int
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def mtp(self, stored: Container[str] = ()) -> ModelSpec | None:
        """Return the MTP layer's spec, or None if the model has none. `stored`: the folder's tensor names, if known."""
        config = {**self.config, "separate_experts": True} if SEPARATE_EXPERT in stored else self.config
        network = describe(self.architecture, ConfigReader(config, CONFIG_NAME, of_mtp=True))
        return None if network.given is None else replace(self, network=network)

    def config_value(self, key: str) -> Any:
        """Return a value of config.json. If it lacks the number of KV heads or layers, take it from the network."""
        caches = self.network.caches
        found = {"num_key_value_heads": caches[0].kv_heads, "num_hidden_layers": len(caches)}
        return self.config.get(key) if self.config.get(key) is not None else found.get(key)

    @property
    def head_dims(self) -> frozenset[int]:
        widths = (width for cache in self.caches for width in (cache.key_width, cache.value_width))
        return frozenset(width for width in widths if width)

    @property
    def caches(self) -> tuple[CacheShape, ...]:
        """Shape of each pair of key and value tensors. Each layer has its own pair, unless `layout` shares pairs."""
        return self.layout.shapes

    @cached_property
    def layout(self) -> CacheLayout:
        """Groups of layers in the KV cache: one group of all layers, unless `with_cache_groups` made this spec."""
        return self.network.layout or ungrouped(self.network.caches, self._windows)

    @cached_property
    def _windows(self) -> list[LayerWindow]:
        windows: list[LayerWindow | None] = [None] * len(self.network.caches)
        for each in self.network.operations:
            if each.kind == "attention":
                window, chunk = each.attributes["window"], each.attributes["chunk"]
                seen = LayerWindow(chunk, is_chunked=True) if chunk else LayerWindow(window)
                layer = each.attributes["layer"]
                windows[layer] = seen if windows[layer] in (None, seen) and self.network.causal else LayerWindow()
        return [each or LayerWindow() for each in windows]

    @property
    def states(self) -> tuple[StateShape, ...]:
        return tuple(self.network.states)

    @cached_property
    def state_bytes(self) -> int:
        return sum(state.num_bytes for state in self.states)

    @cached_property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    @cached_property
    def num_weight_elements(self) -> int:
        """Number of weight elements that this rank computes with, including padding."""
        return sum(math.prod(weight.shape) for weight in self.network.weights if weight.generate is None)

    def of_rank(self, rank: int, num_ranks: int) -> ModelSpec:
        """Return the spec of one rank with its part of the network. Raise ModelError if the model cannot be split."""
        if num_ranks == 1:
            return self
        return replace(self, network=sharded(self.network, rank, num_ranks))

    def with_cache_groups(self, max_model_len: int, *, int8: bool = False) -> ModelSpec:
        """Return the spec with the layers of the KV cache in groups, for requests of up to `max_model_len` tokens.

        In an int8 cache, layers with KV heads of different sizes stay in one group. The scales in its blocks make their
        sizes in bytes no multiples of each other, so that such layers could not share memory.
        """
        network = self.network
        has_groups = network.causal and not (int8 and len(set(network.caches)) > 1)
        layout = grouped(network.caches, self._windows, max_model_len) if has_groups else None
        return replace(self, network=network.changed(layout=layout))

    def of_mindformers(self) -> ModelSpec:
        """Return the spec for MindFormers' KV cache, which has latent vector and rotary key in one tensor (MLA)."""
        return replace(self, network=self.network.changed(caches=joined_caches(self.network)))

    def with_adapters(self, slots: int, max_rank: int, *, as_program: bool) -> tuple[ModelSpec, list[AdaptedLinear]]:
        network, linears = with_adapters(self.network, slots, max_rank, as_program=as_program)
        return replace(self, network=network), linears

    def adapter_bytes(self, slots: int, max_rank: int, dtype_bytes: int) -> int:
        _, linears = self.with_adapters(slots, max_rank, as_program=True)
        return dtype_bytes * sum(math.prod(each.a.shape) + math.prod(each.b.shape) for each in linears)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for weight in self.network.weights
            for name, shape in zip(weight.names, weight.stored_shapes, strict=True)
        }

    @cached_property
    def num_active_parameters(self) -> int:
        """Number of weight elements that one token is multiplied by. The LM head and unused experts do not count."""
        total = 0.0
        top_k = 1
        for each in self.network.operations[:-1]:
            top_k = each.attributes["top_k"] if each.kind == "route" else top_k
            share = top_k / each.attributes["experts"] if each.kind == "experts" else 1.0
            total += sum(share * math.prod(each.weights[role].shape) for role in _MATRICES.get(each.kind, ()))
        return int(total)

    @cached_property
    def max_row_elements(self) -> int:
        return max(
            sum(x.root.width for x in {*each.inputs.values(), *each.outputs.values()})
            for each in self.network.operations
        )

    @cached_property
    def max_weight_elements(self) -> int:
        return max(math.prod(weight.shape) for weight in self.network.weights if weight.generate is None)

    def kv_bytes_per_token(self, dtype_bytes: int, *, int8: bool = False) -> int:
        return sum(cache.bytes_per_token(dtype_bytes, int8=int8) for cache in self.caches)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read `config.json` of a Hugging Face folder, or a GGUF file. Raise ModelError if it is not supported."""
        if is_gguf(folder):
            config, scheme = read_config(folder)
            return cls.from_hugging_face(config, str(folder), scheme)
        path = folder / CONFIG_NAME
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist")
        if not path.exists():
            form = f"a model is a folder in Hugging Face format, with {CONFIG_NAME} beside *.safetensors"
            raise ModelError(f"model folder {folder} has no {CONFIG_NAME}: {form}{how_to_convert(folder)}")
        config = read_json_object(path, MAX_CONFIG_BYTES)
        if config.get("quantization_config") is None:
            config |= _older_quantization_config(folder, config)
        if tokens := score_tokens(folder, config):
            config[SCORE_TOKENS] = tokens
        elif is_embedding_model(folder):
            config["tie_word_embeddings"] = True  # the LM head is never read and may be missing
        spec = cls.from_hugging_face(config, str(path))
        longest = None if spec.network.causal else max_seq_length(folder)
        if longest is None:
            return spec
        return replace(spec, max_position_embeddings=min(longest, spec.max_position_embeddings))

    @classmethod
    def from_hugging_face(
        cls, config: Mapping[str, Any], where: str = CONFIG_NAME, scheme: Scheme | None = None
    ) -> ModelSpec:
        """Return the spec of a config.json. `scheme`: format of the weights, by default that in `config`."""
        architecture = architecture_of(config, where)
        if architecture in chatglm.ARCHITECTURES:
            config = chatglm.normalized_config(ConfigReader(config, where))
        if config.get(TEXT_CONFIG) is not None:
            config = {**config, **ConfigReader(config, where).inner(TEXT_CONFIG).config}
        reader = ConfigReader(config, where)
        scheme = scheme or scheme_of(config, where)
        network = describe(architecture, reader)
        if not network.caches:
            raise ModelError(f"{where}: the model must have at least one layer with attention. Found: none")
        longest = reader.integer("model_max_length", _UNLIMITED) if architecture == "BaichuanForCausalLM" else 2048
        longest = reader.integer("max_position_embeddings", longest)
        bos, eos, pad = (_token_ids(reader, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id"))
        return cls(
            architecture=architecture,
            config=dict(config),
            network=network,
            scheme=scheme,
            vocab_size=network.vocab,
            max_position_embeddings=longest if network.positions is None else network.positions.num_positions,
            bos_token_id=next(iter(bos), None),
            eos_token_ids=eos,
            pad_token_id=next(iter(pad), None),
        )

    @classmethod
    def from_mindformers(cls, config: Mapping[str, Any], where: str = "model_config", network: str = "") -> ModelSpec:
        """Return the spec of a MindFormers YAML. `config`: its `model.model_config`. `network`: `model.arch.type`."""
        return cls.from_hugging_face(config_from_mindformers(config, network, where), where)


def _older_quantization_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    if (given := config.get("compression_config")) is not None:
        is_object = isinstance(given, Mapping)
        return {"quantization_config": {"quant_method": "compressed-tensors", **given} if is_object else given}
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).exists():
            found = read_json_object(folder / name, MAX_CONFIG_BYTES)
            return {"quantization_config": {"quant_method": method, **found}}
    return {}


def _token_ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    found, vocab_size = reader.token_ids(key), reader.integer("vocab_size")
    if any(token_id >= vocab_size for token_id in found):
        raise reader.fail(key, f"must be less than `vocab_size` {vocab_size}")
    return found


@dataclass(frozen=True)
class ContextLengths:
    """The `default` and `maximum` context length in tokens. `reason`: how RoPE scaling made the maximum longer."""

    default: int
    maximum: int
    reason: str = ""


def context_lengths(spec: ModelSpec, folder: Path) -> ContextLengths:
    """Return the context lengths of a model in Hugging Face format. Raise ModelError if a file cannot be read.

    RoPE scaling of kind `linear` or `dynamic` multiplies `max_position_embeddings` by `factor`. `yarn` multiplies the
    original training length. `dynamic` changes only contexts beyond `max_position_embeddings`, so it raises only the
    maximum: a user must request longer contexts. For other kinds, and if some layers have no scaling, both lengths are
    `max_position_embeddings`. `model_max_length` of tokenizer_config.json limits a scaled length.
    """
    own = spec.max_position_embeddings
    scaling = _smallest_scaling(spec.network.rotaries, own)
    if scaling is None or (scaled := _scaled_length(scaling, own)) <= own:
        return ContextLengths(own, own)
    reason = f"{scaling.first(own)} x {scaling.factor:g} by rope scaling {scaling.kind}"
    path = folder / "tokenizer_config.json"
    config = read_json(path, _MAX_TOKENIZER_CONFIG_BYTES) if path.exists() else None
    limit = _positive_number(config.get("model_max_length")) if isinstance(config, dict) else None
    if limit is not None and limit < scaled:
        scaled = max(int(limit), own)
        reason += ", at most model_max_length"
    if scaled == own:
        return ContextLengths(own, own)
    return ContextLengths(own if scaling.kind == "dynamic" else scaled, scaled, reason)


def _smallest_scaling(rotaries: Iterable[Rotary], own: int) -> Scaling | None:
    scalings = [each.scaling for each in rotaries]
    found = [each for each in scalings if each is not None and each.first(own) is not None]
    return min(found, key=lambda each: _scaled_length(each, own)) if found and len(found) == len(scalings) else None


def _scaled_length(scaling: Scaling, own: int) -> int:
    first = scaling.first(own)
    return own if first is None else min(int(first * scaling.factor), _MAX_POSITIONS)


def _positive_number(value: Any) -> float | None:
    given = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if given and 0 < value < _MAX_POSITIONS else None
