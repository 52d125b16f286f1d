"""The shape facts of a model, read from its `config.json` or from a MindFormers `model_config`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.core.quantisation import describe_quantisation
from llm_serving.errors import ModelError, shorten

ARCHITECTURES: Final[Mapping[str, str]] = {"LlamaForCausalLM": "llama"}
"""Name in `architectures` of config.json -> family in `models/`."""

ROPE_SCALINGS: Final = ("linear", "llama3")
CONFIG_NAME: Final = "config.json"
MAX_CONFIG_BYTES: Final = 2**20
MAX_TOKEN_IDS: Final = 256
"""Ids of one kind that a config may list."""

_LARGEST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "head_dim"), 1024),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "n_kv_heads"), 4096),
    **dict.fromkeys(("hidden_size", "intermediate_size", "multiple_of"), 2**20),
    "vocab_size": 2**24,
    "ffn_dim_multiplier": 1024,
    "rms_norm_eps": 1,
}
"""Key of a config -> its largest value: several times that of any model, and small enough to count up to."""
_LARGEST_INTEGER: Final = 2**31 - 1
_LARGEST_NUMBER: Final = 1e30
MAX_VOCAB_SIZE: Final = 2**20
"""Most tokens whose weights are summed exactly when one is chosen."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the positions the model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` divides the low ones by `factor`, keeps the high ones and
    blends between (Llama 3.1): the borders are wavelengths of `original_max_position_embeddings` divided by
    `low_freq_factor` and by `high_freq_factor`.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What master and WorkAgent must know of a model before a weight is read."""

    architecture: str
    """Name as in `ARCHITECTURES`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    """Less than `num_attention_heads` with grouped queries (GQA)."""

    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    """The output head is the embedding table."""

    max_position_embeddings: int = 2048
    """Tokens. Longest context the model was made for."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a text; Llama 3 has several."""

    pad_token_id: int | None = None
    attention_bias: bool = False
    """The projections of attention have a bias."""

    mlp_bias: bool = False
    """The projections of the MLP have a bias."""

    @property
    def family(self) -> str:
        """Key of the model family, such as "llama"."""
        return ARCHITECTURES[self.architecture]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the same for values."""
        return self.num_key_value_heads * self.head_dim

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that keys and values of one token take over all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * dtype_bytes

    @property
    def num_parameters(self) -> int:
        """Weights of the model, biases included; a tied head counts once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_layer_parameters + self.hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Those of the layers, with which every token is computed."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.attention_bias:
            attention += self.q_size + 2 * self.kv_size + self.hidden_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        return self.num_hidden_layers * (attention + mlp + 2 * self.hidden_size)

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelSpec":
        """Read `config.json` of a Hugging Face folder.

        Raises:
            ModelError: The folder or the file is missing or unreadable, or the model is of an unknown family.
        """
        path = folder / CONFIG_NAME
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist")
        if not path.exists():
            raise ModelError(f"model folder {folder} has no {CONFIG_NAME}: is it in Hugging Face form?")
        content = read_regular(path, MAX_CONFIG_BYTES)
        try:
            config = json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path}: must be a JSON object. Given: {shorten(config)}")
        return cls.from_hugging_face(config, str(path))

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], where: str = CONFIG_NAME) -> "ModelSpec":
        """The spec of a parsed `config.json`; `where` names it in errors."""
        architecture = _architecture(config, where)
        facts = _Facts(config, where)
        if (quantised := describe_quantisation(config)) is not None:
            raise ModelError(
                f"{where}: the weights are quantised by {quantised}, which cannot be served: name a copy of the model "
                f"in bfloat16, float16 or float32"
            )
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ModelError(f"{where}: `hidden_act` must be silu. Given: {shorten(act)}")
        heads = facts.integer("num_attention_heads")
        hidden = facts.integer("hidden_size")
        max_positions = facts.integer("max_position_embeddings", 2048)
        theta, scaling = _rope(facts, max_positions)
        return cls(
            architecture=architecture,
            vocab_size=facts.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=facts.integer("intermediate_size"),
            num_hidden_layers=facts.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=facts.integer("num_key_value_heads", heads),
            head_dim=facts.integer("head_dim", hidden // heads),
            rms_norm_eps=facts.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=facts.boolean("tie_word_embeddings"),
            max_position_embeddings=max_positions,
            bos_token_id=next(iter(facts.token_ids("bos_token_id")), None),
            eos_token_ids=facts.token_ids("eos_token_id"),
            pad_token_id=next(iter(facts.token_ids("pad_token_id")), None),
            attention_bias=facts.boolean("attention_bias"),
            mlp_bias=facts.boolean("mlp_bias"),
        )._checked(where)

    @classmethod
    def from_mindformers(cls, config: Mapping[str, Any], where: str = "model_config") -> "ModelSpec":
        """The spec of `model.model_config` in a MindFormers YAML; `where` names it in errors.

        MindFormers leaves `intermediate_size` out for the first Llama models: it follows from the rule of their
        reference code, two thirds of four times the width, times `ffn_dim_multiplier`, rounded up to `multiple_of`.
        """
        facts = _Facts(config, where)
        heads = facts.integer("num_heads")
        hidden = facts.integer("hidden_size")
        intermediate = facts.integer("intermediate_size", 0)
        if not intermediate:
            multiple = facts.integer("multiple_of", 256)
            width = int(facts.number("ffn_dim_multiplier", 1.0) * int(8 * hidden / 3))
            intermediate = multiple * math.ceil(width / multiple)
        return cls(
            architecture="LlamaForCausalLM",
            vocab_size=facts.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=facts.integer("num_layers"),
            num_attention_heads=heads,
            num_key_value_heads=facts.integer("n_kv_heads", heads),
            head_dim=facts.integer("head_dim", hidden // heads),
            rms_norm_eps=facts.number("rms_norm_eps", 1e-6),
            rope_theta=facts.number("theta", 10000.0),
            tie_word_embeddings=facts.boolean("tie_word_embeddings"),
            max_position_embeddings=facts.integer("max_position_embedding", facts.integer("seq_length", 2048)),
            bos_token_id=next(iter(facts.token_ids("bos_token_id")), None),
            eos_token_ids=facts.token_ids("eos_token_id"),
            pad_token_id=next(iter(facts.token_ids("pad_token_id")), None),
            attention_bias=facts.boolean("qkv_has_bias"),
        )._checked(where)

    def _checked(self, where: str) -> "ModelSpec":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"{where}: `num_attention_heads` {self.num_attention_heads} must be a multiple of "
                f"`num_key_value_heads` {self.num_key_value_heads}"
            )
        if self.intermediate_size > _LARGEST["intermediate_size"]:
            rule = f"must be <= {_LARGEST['intermediate_size']}"
            raise ModelError(f"{where}: `intermediate_size` {rule}. Given: {self.intermediate_size}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"{where}: `head_dim` must be even for rotary embeddings. Given: {self.head_dim}")
        for token_id in (self.bos_token_id, *self.eos_token_ids, self.pad_token_id):
            if token_id is not None and token_id >= self.vocab_size:
                raise ModelError(f"{where}: token id {token_id} must be < `vocab_size` {self.vocab_size}")
        return self


class _Facts:
    """Reads typed values out of a mapping that someone else wrote; null counts as absent."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def _fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.where}: `{key}` {rule}. Given: {shorten(self.config.get(key))}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        largest = _LARGEST.get(key, _LARGEST_INTEGER)
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
            raise self._fail(key, f"must be an integer >= 1{_upper(key)}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
            try:
                value = float(value)
            except ValueError:
                raise self._fail(key, "must be a number > 0") from None
        largest = _LARGEST.get(key, _LARGEST_NUMBER)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= largest:
            raise self._fail(key, f"must be a number > 0{_upper(key)}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._fail(key, "must be true or false")
        return bool(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id or a list of ids. Negative ids, as some folders write for "none", are left out."""
        value = self.config.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self._fail(key, "must be a token id or a list of them")
        if len(items) > MAX_TOKEN_IDS:
            raise self._fail(key, f"must be at most {MAX_TOKEN_IDS} token ids")
        return tuple(item for item in items if item >= 0)


def _upper(key: str) -> str:
    return f" and <= {_LARGEST[key]}" if key in _LARGEST else ""


def _architecture(config: Mapping[str, Any], where: str) -> str:
    known = ", ".join(ARCHITECTURES)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(f"{where}: `architectures` must name one of: {known}. Given: {shorten(names)}")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    raise ModelError(f"{where}: architecture {shorten(names[0])} is not supported. Known: {known}")


def _rope(facts: _Facts, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` + `rope_scaling` or from the newer `rope_parameters`, which holds both."""
    config, where = facts.config, facts.where
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(key)
    if scaling is None:
        return facts.number("rope_theta", 10000.0), None
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{where}: `{key}` must be an object. Given: {shorten(scaling)}")
    inner = _Facts(scaling, f"{where}: {key}")
    theta = inner.number("rope_theta", facts.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ROPE_SCALINGS:
        known = ", ".join(("default", *ROPE_SCALINGS))
        raise ModelError(f"{where}: `{key}` of type {shorten(kind)} is not supported. Known: {known}")
    if scaling.get("factor") is None:
        raise ModelError(f"{where}: `{key}` must have a `factor`")
    factor = inner.number("factor", 1.0)
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=max_positions)
    low, high = inner.number("low_freq_factor", 1.0), inner.number("high_freq_factor", 4.0)
    if low >= high:
        raise ModelError(f"{where}: `{key}` must have low_freq_factor < high_freq_factor. Given: {low}, {high}")
    original = inner.integer("original_max_position_embeddings", 8192)
    return theta, RopeScaling(
        kind=kind, factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
    )
