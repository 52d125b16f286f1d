"""Writes small tokenizers of every kind, and the ids that the reference libraries give an awkward corpus.

`python golden_ids.py` where transformers 4, mistral-common, tiktoken and sentencepiece are installed. The files are
trained here; the regular expressions are those that the families publish.
"""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tokenizers"
EXPECTED = FOLDER / "expected.json"

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def training_texts() -> list[str]:
    words = "the quick brown fox jumps over lazy dogs and hello world what is a count of numbers don't we'll they're"
    more = "数える 一二三 你好 世界 naïve café привет мир مرحبا بالعالم שלום 안녕 สวัสดี 😀 def return self print"
    pool = words.split() + more.split()
    generator = random.Random(7)
    lines = [
        " ".join(generator.choices(pool, k=12)) + generator.choice([".", "!\n", "  \t", "?? 123 4567"])
        for _ in range(400)
    ]
    return [line.capitalize() if i % 5 == 0 else line for i, line in enumerate(lines)]


def awkward_texts(special: list[str]) -> dict[str, str]:
    first, last = special[0], special[-1]
    texts = {
        "empty": "",
        "one space": " ",
        "spaces": "    ",
        "leading space": " hello",
        "leading spaces": "   hello",
        "trailing spaces": "hello   ",
        "words": "Hello world, what is the count?",
        "contractions": "don't DON'T we'll They'RE 'sit",
        "digits": "1 12 123 1234 12345 3.14159 1,000,000 ١٢٣ ²½",
        "line breaks": "a\nb\r\nc\n\n\nd\n  e \n f\r",
        "tabs": "\tdef f(x):\n\t\treturn\tx  # y",
        "emoji": "😀👍🏽 🎉",
        "joined emoji": "👨‍👩‍👧‍👦 🏳️‍🌈",
        "Chinese": "你好,世界!一二三 数える。",
        "Arabic": "مرحبا بالعالم، كيف الحال؟",
        "Hebrew with marks": "שָׁלוֹם",
        "Thai and Korean": "สวัสดี 안녕하세요",
        "combining": "e\u0301 n\u0303 é ñ ﬁ Å",
        "control characters": "a\x00b\x01c\x7fd\x1be",
        "invisible": "a\u200bb\u00a0c\u2028d\ufeffe\u3000f",
        "private and unassigned": "\ue000\U0010ffff\U000e0001",
        "underlines": "▁a ▁▁b a▁b ▁",
        "bytes by name": "<0x0A><0x41>",
        "long run of letters": "a" * 3000,
        "long run of spaces": "x" + " " * 3000 + "y",
        "long run of marks": "=" * 1000 + "-" * 999,
        "long run of line breaks": "\n" * 700,
        "mixed case": "HELLO World hELLO wORLD CamelCase snake_case",
        "code": "for (int i=0;i<10;++i) { a[i] = i*2; } // ok",
        "unknown signs": "ᚠᛇᚻ 𓀀 ꙮ",
    }
    for name, token in (("first", first), ("last", last)):
        texts |= {
            f"{name} special alone": token,
            f"{name} special at the beginning": f"{token}hello",
            f"{name} special before a space": f"{token} hello",
            f"{name} special at the end": f"hello {token}",
            f"{name} special inside": f"a{token}b {token} c  {token}  d",
            f"{name} special twice": f"{token}{token} {token}\n{token}",
            f"{name} special incomplete": token[:-1] + " " + token[1:],
            f"{name} special before an underline": f"{token}▁a",
        }
    return texts


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (folder / name).write_text(text, "utf-8")


def fresh(name: str) -> Path:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def token(text: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": text} | usual | flags


LLAMA_ADDED = {
    "0": token("<unk>"),
    "1": token("<s>"),
    "2": token("</s>"),
    "500": token("<|call|>"),
    "501": token("<|left|>", lstrip=True),
    "502": token("<|right|>", rstrip=True, special=False),
    "503": token("word", single_word=True, special=False),
}


def sentencepiece_model(kind: str, **more: Any) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_texts()),
        model_writer=model,
        model_type=kind,
        vocab_size=500,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        max_sentence_length=10**6,
        minloglevel=2,
        num_threads=1,
        **more,
    )
    return model.getvalue()


def llama_folders() -> dict[str, list[str]]:
    bpe = sentencepiece_model(
        "bpe", normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True
    )
    unigram = sentencepiece_model("unigram", hard_vocab_limit=False, normalization_rule_name="identity")
    added = [each["content"] for each in LLAMA_ADDED.values()]
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"additional_special_tokens": ["<|call|>", "<|left|>"], "added_tokens_decoder": LLAMA_ADDED}
    kinds: dict[str, tuple[bytes, dict[str, Any]]] = {
        "llama_legacy": (bpe, {"legacy": True}),
        "llama": (bpe, {"legacy": False}),
        "llama_without_prefix": (bpe, {"legacy": False, "add_prefix_space": False, "add_eos_token": True}),
        "llama_unigram_legacy": (unigram, {"add_bos_token": False}),
        "llama_unigram": (unigram, {"legacy": False}),
    }
    for name, (model, more) in kinds.items():
        folder = fresh(name)
        (folder / "tokenizer.model").write_bytes(model)
        write(folder, "tokenizer_config.json", config | more)
    older = fresh("llama_of_older_files")
    (older / "tokenizer.model").write_bytes(bpe)
    write(
        older, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    )
    write(older, "special_tokens_map.json", {"pad_token": "<pad>", "additional_special_tokens": ["<|call|>"]})
    write(older, "added_tokens.json", {"<pad>": 500, "<|call|>": 501})
    return {name: ["<s>", *added] for name in kinds} | {"llama_of_older_files": ["<s>", "<pad>", "<|call|>"]}


def byte_pairs(pattern: str, normalizer: Any = None) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


def ranks_of(tokenizer: Any) -> list[bytes]:
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(byte_of[char] for char in piece) for piece, _ in vocab]


def json_folders() -> dict[str, list[str]]:
    from tokenizers import AddedToken, normalizers, processors

    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = byte_pairs(LLAMA3)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    begin = tokenizer.token_to_id(special[0])
    template = processors.TemplateProcessing(f"{special[0]} $A", special_tokens=[(special[0], begin)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    folder = fresh("json_llama3")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": special[0], "eos_token": special[1]}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | names)

    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_pairs(QWEN, normalizers.NFC())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in chat])
    folder = fresh("json_qwen2")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    # Later tokens of a family are often in the config alone.
    count = tokenizer.get_vocab_size()
    added = {str(count - 3 + i): token(text) for i, text in enumerate(chat)}
    added |= {str(count): token("<tool_call>", special=False), str(count + 1): token("<think>", special=False)}
    config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": chat[2], "add_bos_token": False}
    write(folder, "tokenizer_config.json", config | {"added_tokens_decoder": added})
    return {"json_llama3": special, "json_qwen2": [*chat, "<tool_call>", "<think>"]}


def tiktoken_folders() -> dict[str, list[str]]:
    llama3, qwen = ranks_of(byte_pairs(LLAMA3)), ranks_of(byte_pairs(QWEN))

    def lines(ranks: list[bytes]) -> str:
        return "".join(f"{base64.b64encode(data).decode()} {rank}\n" for rank, data in enumerate(ranks))

    write(fresh("tiktoken_llama3"), "tokenizer.model", lines(llama3))
    folder = fresh("tiktoken_glm4")
    write(folder, "tokenizer.model", lines(llama3))
    glm = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"]
    added = {str(len(llama3) + i): token(text) for i, text in enumerate(glm)}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "eos_token": glm[0], "additional_special_tokens": glm}
    write(folder, "tokenizer_config.json", config | {"added_tokens_decoder": added})
    write(fresh("tiktoken_qwen"), "qwen.tiktoken", lines(qwen))
    tekken = sorted(ranks_of(byte_pairs(TEKKEN))[:256]) + ranks_of(byte_pairs(TEKKEN))[256:]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(data).decode(), "token_str": data.decode("utf-8", "replace")}
        for rank, data in enumerate(tekken)
    ]
    sizes = {"num_vocab_tokens": len(tekken), "default_vocab_size": 30 + 480, "default_num_special_tokens": 30}
    old = {"config": {"pattern": TEKKEN, **sizes, "version": "v3"}, "vocab": vocab}
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<think>"]
    listed = [{"rank": i, "token_str": text, "is_control": text != "<think>"} for i, text in enumerate(special)]
    new = {"config": {"pattern": TEKKEN, **sizes, "version": "v11"}, "vocab": vocab, "special_tokens": listed}
    write(fresh("tekken_v3"), "tekken.json", json.dumps(old) + "\n")
    write(fresh("tekken_v11"), "tekken.json", json.dumps(new) + "\n")
    return {
        "tiktoken_llama3": ["<|begin_of_text|>", "<|eot_id|>"],
        "tiktoken_glm4": glm,
        "tiktoken_qwen": ["<|endoftext|>", "<|im_start|>", "<|extra_204|>"],
        "tekken_v3": ["<s>", "[TOOL_CALLS]"],
        "tekken_v11": special,
    }


def reference(name: str) -> Any:
    """Return a function from a text to its ids, with and without the special tokens that the reference adds."""
    folder = FOLDER / name
    if name.startswith("llama"):
        from transformers import LlamaTokenizer

        slow = LlamaTokenizer.from_pretrained(folder)
        return lambda text, special: slow.encode(text, add_special_tokens=special)
    if name.startswith("json"):
        from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

        fast = (PreTrainedTokenizerFast if "llama" in name else Qwen2TokenizerFast).from_pretrained(folder)
        return lambda text, special: fast.encode(text, add_special_tokens=special)
    import tiktoken

    if name.startswith("tekken"):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        tekken = Tekkenizer.from_file(folder / "tekken.json")
        ids = {tekken.id_to_piece(i): i for i in range(tekken.num_special_tokens)}

        def encode_plain(text: str) -> list[int]:
            ids: list[int] = tekken.encode(text, bos=False, eos=False)
            return ids

        # That library takes no special tokens from texts, others of this format do: what is between them is compared.
        return lambda text, special: [1] * special + split_and_encode(text, ids, encode_plain)
    from tiktoken.load import load_tiktoken_bpe

    (path,) = [each for each in folder.iterdir() if each.name != "tokenizer_config.json"]
    ranks = load_tiktoken_bpe(str(path))
    special_texts = {
        "tiktoken_llama3": {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|eot_id|>": 9},
        "tiktoken_qwen": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|extra_204|>": 207},
        "tiktoken_glm4": {},
    }[name]
    if name == "tiktoken_glm4":
        added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        special_texts = {each["content"]: int(number) - len(ranks) for number, each in added.items()}
    encoding = tiktoken.Encoding(
        name,
        pat_str=QWEN if "qwen" in name else LLAMA3,
        mergeable_ranks=ranks,
        special_tokens={text: len(ranks) + i for text, i in special_texts.items()},
    )
    begin = {"tiktoken_llama3": [0], "tiktoken_qwen": [], "tiktoken_glm4": [2, 4]}[name]

    def encode(text: str, special: bool) -> list[int]:
        import unicodedata

        text = unicodedata.normalize("NFC", text) if "qwen" in name else text
        ids = encoding.encode(text, allowed_special="all", disallowed_special=())
        return [len(ranks) + i for i in begin] * special + ids

    return encode


def split_and_encode(text: str, ids: dict[str, int], encode: Any) -> list[int]:
    import re

    parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text)
    return [each for part in parts if part for each in ([ids[part]] if part in ids else encode(part))]


def main() -> int:
    folders = llama_folders() | json_folders() | tiktoken_folders()
    expected = {}
    for name, special in folders.items():
        encode = reference(name)
        texts = awkward_texts(special)
        expected[name] = [[title, text, encode(text, True), encode(text, False)] for title, text in texts.items()]
    rows = ",\n".join(
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(_packed(row)) for row in rows) + "\n]"
        for name, rows in expected.items()
    )
    EXPECTED.write_text("{\n" + rows + "\n}\n", "utf-8")
    return 0


def _packed(row: list[Any]) -> list[Any]:
    """Return runs of one character or id as [value, count], which shortens long ones."""
    title, text, with_special, without = row
    return [title, _runs(list(text)), _runs(with_special), _runs(without)]


def _runs(items: list[Any]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for item in items:
        if runs and runs[-1][0] == item:
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    return runs


if __name__ == "__main__":
    sys.exit(main())
