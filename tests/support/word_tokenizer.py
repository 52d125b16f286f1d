"""A tokenizer whose tokens are numbers, so that ids and text are easy to compare."""

from __future__ import annotations

from support.fake_runner import VOCAB_SIZE

_TEXTS = [f"{token} " for token in range(VOCAB_SIZE)]
_BYTES = [text.encode() for text in _TEXTS]


class WordTokenizer:
    """A tokenizer in which token i has the text "i "; it has only what the engine needs."""

    strips_leading_space = False
    eos_token_ids = (2,)

    def token_tables(self, skip_special_tokens: bool) -> tuple[list[bytes], list[str | None]]:
        del skip_special_tokens
        return _BYTES, _TEXTS
