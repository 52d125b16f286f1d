"""Small tokenizer folders of each kind."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello there", "数える 一二三 naïve café 😀"] * 3


def byte_level_folder(folder: Path, **config: object) -> Path:
    """Write a tokenizer.json like that of Llama 3: byte-level BPE, begin-of-text added by the post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|eot|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, bos_token="<|begin|>", eos_token={"content": "<|eot|>"}, **config)
    return folder


def byte_fallback_folder(folder: Path, **config: object) -> Path:
    """Write a tokenizer.json like that of Llama 2: sentencepiece's rules expressed for the other library."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "el", "lo", "▁w", "or", "ld", "▁hel", "▁hello"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁", "w"), ("o", "r"), ("l", "d"), ("▁h", "el"), ("▁hel", "lo")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(folder, **({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True} | config))
    return folder


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
