"""Rules that split a text into words, by names in GGUF files. Sources: the models' own `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from llm_serving.text.tokenizer.byte_pairs import GPT2, LLAMA3_WORDS, QWEN2, SMOLLM, Words
from llm_serving.text.tokenizer.tiktoken import LLAMA3


class Pre(NamedTuple):
    """A named splitting rule. `begins`: whether a text starts with `bos_token` if the file lacks `add_bos_token`."""

    words: Words
    begins: bool = False


_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(suffix: str, digits: str, *, upper: str = _UPPER, lower: str = _LOWER, end: str = _END) -> str:
    """Return an expression that splits words between a lower-case letter and an upper-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|{digits}|{end}"


_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN: Final = _by_case("", r"\p{N}")
_GPT4O: Final = _by_case(_CONTRACTION, r"\p{N}{1,3}")
_KIMI: Final = r"\p{Han}+|" + _by_case(
    _CONTRACTION,
    r"\p{N}{1,3}",
    upper=r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    lower=r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    end=_END.replace("/", ""),
)
_SEED: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED: Final = (
    rb"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    rb"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    rb"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    rb"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    rb"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    rb"\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    rb"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    rb"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    rb"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
).decode("unicode_escape")
"""Letters with two cases, as DeepSeek's tokenizers up to V2 list them."""
_HAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK: Final = Words(
    (
        "[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER: Final = Words(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"))
_DEEPSEEK3: Final = Words(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_GPT4: Final = Pre(Words((LLAMA3.pattern,)))
_LLAMA3: Final = Pre(LLAMA3_WORDS, begins=True)
_DIGITS: Final = Pre(SMOLLM)

PRES: Final[Mapping[str, Pre]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _GPT4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Pre(QWEN2)),
    **dict.fromkeys(("hunyuan", "stablelm2"), Pre(QWEN2._replace(composes=False))),
    "qwen35": Pre(Words((_QWEN35,), composes=True)),
    **dict.fromkeys(("gpt-2", "granite-docling", "olmo", "exaone4"), Pre(GPT2)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), _DIGITS),
    "tekken": Pre(Words((_TEKKEN,), whole=True), begins=True),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), Pre(Words((_GPT4O,)))),
    "kimi-k2": Pre(Words((_KIMI,))),
    "seed-coder": Pre(Words((_SEED,))),
    "deepseek-llm": Pre(_DEEPSEEK),
    "deepseek-coder": Pre(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Pre(_DEEPSEEK3)),
}
