"""Section `quant_config`."""

from dataclasses import dataclass

from llm_serving.config.rules import choice, one_of, option
from llm_serving.core.enums import KVCacheDtypeName, QuantizationName
from llm_serving.network.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Section `quant_config`: weights, keys and values of fewer bits than `model_dtype` has."""

    quantization: str | None = option(None, choice(tuple(QuantizationName)))
    """How weights are kept and multiplied; they are rounded one by one while they are read. `w8a8`: weights of 8 bits
    with a scale for each output, times activations brought to 8 bits with a scale for each token. `w8a16`: the same
    weights, times activations as they are. `w4a16`: weights of 4 bits with a scale for each output and `group_size`
    inputs, the head in 8 bits. `w4a8`: the same weights, times activations brought to 8 bits, and the head as of
    `w8a8`. Norms, biases and tables that are only looked up stay in `model_dtype`. On a CPU with
    `kernels: program`; `w8a8` also with `primitives` and on Ascend. None: in `model_dtype`."""

    group_size: int = option(128, one_of((32, 64, 128)))
    """Inputs with one scale in weights of 4 bits; those whose rows it does not divide are kept in 8 bits."""

    kv_cache_dtype: str = option(KVCacheDtypeName.AUTO.value, choice(tuple(KVCacheDtypeName)))
    """How keys and values are kept. `int8`: in 8 bits, with a scale for each token and head: about half the bytes, so
    that the same memory holds nearly twice the tokens. On a CPU with `kernels: program`. `auto`: in `model_dtype`."""

    @property
    def has_coded_cache(self) -> bool:
        """Whether keys and values are kept in 8 bits."""
        return self.kv_cache_dtype == KVCacheDtypeName.INT8

    @property
    def weights(self) -> Quantization | None:
        """How weights are kept."""
        return None if self.quantization is None else Quantization(QuantizationName(self.quantization), self.group_size)
