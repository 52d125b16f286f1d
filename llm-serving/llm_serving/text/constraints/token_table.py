"""The tokens of a tokenizer as llguidance reads them."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from llm_serving.text.tokenizer import Tokenizer


class _Tokens:
    """A tokenizer by the names that `TokenizerWrapper` asks for; any of ours will do, as all tell bytes of tokens."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], token_bytes: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = token_bytes
        # What ends an output is no text of it, whatever its bytes are.
        special = tokenizer.mark_ids.union(end_ids)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < len(token_bytes))

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def token_table(tokenizer: Tokenizer, end_ids: Sequence[int], token_bytes: Sequence[bytes]) -> LLTokenizer:
    """Takes a second for 200,000 tokens.

    Args:
        tokenizer: The tokenizer.
        end_ids: Ids that end an output, at least one.
        token_bytes: Text of each token that can be chosen.
    """
    known = [token_id for token_id in end_ids if token_id < len(token_bytes)]
    wrapped = TokenizerWrapper(_Tokens(tokenizer, known, token_bytes))
    return LLTokenizer(wrapped, n_vocab=len(token_bytes), eos_token=known)
