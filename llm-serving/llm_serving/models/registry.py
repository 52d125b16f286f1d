"""The model families by the architecture names of configurations."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from llm_serving.errors import ModelError, shorten
from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network

Family = Callable[[ConfigReader], Network]
"""Builds the network of a configuration. Raises ModelError if a value is missing, out of range or not supported."""

FAMILIES: Final[Mapping[str, tuple[str, str]]] = {
    "LlamaForCausalLM": ("llama", "llama"),
    "Qwen2ForCausalLM": ("qwen", "qwen2"),
    "Qwen2MoeForCausalLM": ("qwen", "qwen2"),
    "Qwen3ForCausalLM": ("qwen", "qwen3"),
    "Qwen3MoeForCausalLM": ("qwen", "qwen3"),
    "Qwen3NextForCausalLM": ("qwen_next", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("qwen_next", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen_next", "qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ("qwen_next", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen_next", "qwen3_5"),
    "MistralForCausalLM": ("mistral", "mistral"),
    "MixtralForCausalLM": ("mistral", "mistral"),
    "Phi3ForCausalLM": ("phi3", "phi3"),
    "PhimoeForCausalLM": ("phi3", "phimoe"),
    "PhiMoEForCausalLM": ("phi3", "phimoe"),
    "InternLM2ForCausalLM": ("llama", "internlm2"),
    "InternLM3ForCausalLM": ("llama", "internlm3"),
    "BaichuanForCausalLM": ("baichuan", "baichuan2"),
    "GlmForCausalLM": ("glm", "glm"),
    "Glm4ForCausalLM": ("glm", "glm4"),
    "ChatGLMModel": ("chatglm", "chatglm"),
    "ChatGLMForConditionalGeneration": ("chatglm", "chatglm"),
    "GemmaForCausalLM": ("gemma", "gemma"),
    "Gemma2ForCausalLM": ("gemma", "gemma2"),
    "Gemma3nForCausalLM": ("gemma3n", "gemma3n"),
    "Gemma3nForConditionalGeneration": ("gemma3n", "gemma3n"),
    "Gemma4ForCausalLM": ("gemma4", "gemma4"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4"),
    "Gemma3ForCausalLM": ("gemma", "gemma3"),
    "GraniteForCausalLM": ("granite", "granite"),
    "MiniCPM3ForCausalLM": ("minicpm3", "minicpm3"),
    "Llama4ForCausalLM": ("llama4", "llama4"),
    "Llama4ForConditionalGeneration": ("llama4", "llama4"),
    "SmolLM3ForCausalLM": ("llama", "smollm3"),
    "DeepseekV2ForCausalLM": ("deepseek", "deepseek_v2"),
    "DeepseekV3ForCausalLM": ("deepseek", "deepseek_v3"),
    "DeepseekV32ForCausalLM": ("deepseek", "deepseek_v32"),
    "Glm4MoeForCausalLM": ("glm", "glm4_moe"),
    "Glm4MoeLiteForCausalLM": ("deepseek", "glm4_moe_lite"),
    "GlmMoeDsaForCausalLM": ("deepseek", "glm_moe_dsa"),
    "MiniMaxM2ForCausalLM": ("minimax", "minimax_m2"),
    "Olmo2ForCausalLM": ("olmo", "olmo2"),
    "Olmo3ForCausalLM": ("olmo", "olmo3"),
    "SeedOssForCausalLM": ("llama", "seed_oss"),
    "Ernie4_5ForCausalLM": ("ernie", "ernie4_5"),
    "Ernie4_5_MoeForCausalLM": ("ernie", "ernie4_5"),
    "HunYuanDenseV1ForCausalLM": ("hunyuan", "hunyuan"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan", "hunyuan"),
    "Exaone4ForCausalLM": ("exaone", "exaone4"),
    "GraniteMoeForCausalLM": ("granite", "granite"),
    "GraniteMoeHybridForCausalLM": ("granite", "granite_hybrid"),
    "FalconH1ForCausalLM": ("falcon_h1", "falcon_h1"),
    "NemotronHForCausalLM": ("nemotron", "nemotron_h"),
    "Ministral3ForCausalLM": ("mistral", "ministral3"),
    "GptOssForCausalLM": ("gpt_oss", "gpt_oss"),
    "CohereForCausalLM": ("cohere", "cohere"),
    "Cohere2ForCausalLM": ("cohere", "cohere2"),
    "StableLmForCausalLM": ("stablelm", "stablelm"),
    "Starcoder2ForCausalLM": ("starcoder2", "starcoder2"),
    "GPTNeoXForCausalLM": ("gpt_neox", "gpt_neox"),
    "Lfm2ForCausalLM": ("lfm2", "lfm2"),
    "Lfm2MoeForCausalLM": ("lfm2", "lfm2_moe"),
    "BertModel": ("bert", "bert"),
    "BertForMaskedLM": ("bert", "bert"),
    "BertForSequenceClassification": ("bert", "bert_classifier"),
    "RobertaModel": ("bert", "roberta"),
    "RobertaForSequenceClassification": ("bert", "roberta_classifier"),
    "XLMRobertaModel": ("bert", "roberta"),
    "XLMRobertaForMaskedLM": ("bert", "roberta"),
    "XLMRobertaForSequenceClassification": ("bert", "roberta_classifier"),
    "ModernBertModel": ("modernbert", "modernbert"),
    "ModernBertForMaskedLM": ("modernbert", "modernbert"),
    "ModernBertForSequenceClassification": ("modernbert", "modernbert_classifier"),
}
"""Name in `architectures` of a configuration -> (module of this package, function)."""


_ENCODERS: Final = re.compile(r"Bert|Roberta|Electra|Deberta|MPNet|XLM|T5Encoder|NewModel|(?i:bidirectional)")
_OF_DECODERS: Final = re.compile(r"(Model|ForSequenceClassification)$")
_MAX_NAME_CHARS: Final = 128
_WHAT_FOR: Final = re.compile(r"(For[A-Z]\w*|LMHead)?(Model)?$")


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """Return the first name in `architectures` that is a key of FAMILIES. `Qwen3Model` counts as `Qwen3ForCausalLM`."""
    known = ", ".join(FAMILIES)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(f"{where}: `architectures` must name one of: {known}. Given: {shorten(names)}")
    for name in names:
        if not isinstance(name, str):
            continue
        whole = name if name in FAMILIES else f"{_OF_DECODERS.sub('', name)}ForCausalLM"
        is_encoder = _ENCODERS.search(name) is not None
        # "vision": only the tokens of an image attend to both sides (Gemma 4).
        bidirectional = config.get("use_bidirectional_attention")
        of_both_sides = config.get("is_causal") is False or (bidirectional and bidirectional != "vision")
        if (of_both_sides or is_encoder) and not (is_encoder and whole in FAMILIES):
            encoders = ", ".join(each for each in FAMILIES if _ENCODERS.search(each))
            raise ModelError(
                f"{where}: {shorten(name)} is an encoder (bidirectional) that is not supported. Known encoders: "
                f"{encoders}"
            )
        if whole in FAMILIES:
            return whole
    takes = " It accepts images; only text models are supported." if config.get("vision_config") is not None else ""
    text = f"architecture {shorten(names[0])} is not supported.{takes or _nearest(names[0])} Known: {known}"
    raise ModelError(f"{where}: {text}")


def _nearest(name: Any) -> str:
    if not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:  # the time is quadratic in the length
        return ""
    own = {_WHAT_FOR.sub("", each): each for each in FAMILIES}
    near = difflib.get_close_matches(_WHAT_FOR.sub("", name), own, 1, 0.7)
    return f" Nearest: {own[near[0]]}." if near else ""


def describe(architecture: str, reader: ConfigReader) -> Network:
    module, function = FAMILIES[architecture]
    family: Family = getattr(importlib.import_module(f"llm_serving.models.{module}"), function)
    return family(reader)
