"""Typed access to a model's configuration. An error names the key, the rule and the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from llm_serving.errors import ModelError, shorten

MAX_TOKEN_IDS: Final = 256
MAX_LAYERS: Final = 1024
TEXT_CONFIG: Final = "text_config"

_LARGEST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_nextn_predict_layers", "head_dim"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "n_kv_heads"), 4096),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "multiple_of"), 2**20),
    "shared_expert_intermediate_size": 2**20,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4096),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_shared_experts", "moe_num_shared_experts"), 4096),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys(("ffn_dim_multiplier", "attention_factor", "mscale", "mscale_all_dim"), 1024),
    "vocab_size": 2**24,
    "rms_norm_eps": 1,
}
_LEAST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base", "original_max_position_embeddings"), 2)
}
"""Configuration key -> minimum of its value, if that is not 1. Code divides by the logarithm of these values."""
_LARGEST_INTEGER: Final = 2**31 - 1
_LARGEST_NUMBER: Final = 1e30
_LEAST_NUMBER: Final = 1e-30
"""Minimum of numbers: far above the smallest float32, so that products and quotients do not underflow."""


class ConfigReader:
    """Reads typed values from an untrusted mapping. A key with the value null counts as absent. An invalid value raises
    ModelError. With `of_mtp`, a model family describes its MTP layer (`models.layers`) instead of the main network.
    """

    def __init__(self, config: Mapping[str, Any], where: str, *, of_mtp: bool = False) -> None:
        self.config = config
        self.where = where
        self.of_mtp = of_mtp

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.where}: `{key}` {rule}. Given: {shorten(self.config.get(key))}")

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def is_absent(self, key: str) -> bool:
        return key not in self.config

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(key, default)
        largest, least = _LARGEST.get(key, _LARGEST_INTEGER), _LEAST.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
            upper = f" and <= {largest}" if key in _LARGEST else ""
            raise self.fail(key, f"must be an integer >= {least}{upper}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number within the key's limits in `_LEAST` and `_LARGEST`, by default 1e-30 to 1e30."""
        value = self._value(key, default)
        least, largest = _LEAST.get(key, _LEAST_NUMBER), _LARGEST.get(key, _LARGEST_NUMBER)
        rule = f"must be a number from {least:g} to {largest:g}"
        if isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
            try:
                value = float(value)
            except ValueError:
                raise self.fail(key, rule) from None
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= largest:
            raise self.fail(key, rule)
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def choice(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        value = self._value(key, default)
        if value not in known:
            raise self.fail(key, f"must be {' or '.join(known)}")
        return str(value)

    def choices(self, key: str, known: Sequence[Any], count: int) -> list[Any] | None:
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(each not in known for each in value):
            raise self.fail(key, f"must be a list of {count} values, each {' or '.join(map(str, known))}")
        return value

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Return `count` flags, which the configuration writes as 0 or 1. Return None if the key is absent."""
        values = self.choices(key, (0, 1), count)
        return None if values is None else [bool(each) for each in values]

    def integers(self, key: str) -> list[int]:
        value = self._value(key, [])
        bad = not isinstance(value, list) or len(value) > MAX_LAYERS
        if bad or any(type(each) is not int or each < 0 for each in value):
            raise self.fail(key, f"must be a list of at most {MAX_LAYERS} integers >= 0")
        return list(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.config.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(key, f"must be a list of {count} numbers")
        for each in value:
            is_number = isinstance(each, int | float) and not isinstance(each, bool)
            if not is_number or not _LEAST_NUMBER <= each <= _LARGEST_NUMBER:
                raise self.fail(key, f"must be a list of numbers from {_LEAST_NUMBER:g} to {_LARGEST_NUMBER:g}")
        return tuple(float(each) for each in value)

    def inner(self, key: str) -> ConfigReader:
        value = self.config.get(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, "must be an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return an id or a list of ids as a tuple, without negative ids, which some folders write for "none"."""
        value = self.config.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.fail(key, "must be a token id or a list of them")
        if len(items) > MAX_TOKEN_IDS:
            raise self.fail(key, f"must have at most {MAX_TOKEN_IDS} token ids")
        return tuple(item for item in items if item >= 0)
