"""A confined process that compiles a grammar as a trial before the master compiles it.

Even a short grammar may take minutes to compile, or overflow the stack. In that case only this process ends. Its stack
is smaller than the stacks of the master's compiling threads, so a grammar that passes the trial does not overflow their
stacks either. The trial uses a tokenizer of single bytes, because the cost does not depend on the model's tokens.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llm_serving.text.sandbox import serve
from llm_serving.text.structured_output.grammars import Grammar, GrammarError, fault_in, json_grammar
from llm_serving.text.structured_output.matcher import matcher_of

MODULE: Final = "llm_serving.text.structured_output.grammar_process"
MAX_MEMORY_BYTES: Final = 2**30
STACK_BYTES: Final = 2**22
NUM_STEPS: Final = 16
MAX_SEARCH_S: Final = 0.5


class Try(msgspec.Struct):
    grammar: str
    max_states: int
    num_tokens: int
    """Number of the model's tokens. Grammars may refer to tokens by id."""


class Tried(msgspec.Struct):
    error: str
    place: str = ""
    """JSON pointer to the part of a schema that cannot be compiled, or "" if this part is unknown."""


def main(argv: Sequence[str] | None = None) -> int:
    codes: list[int] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: codes.append(serve(MODULE, Try, _answer, argv, MAX_MEMORY_BYTES)))
    thread.start()
    thread.join()
    return codes[0]


class _Bytes:
    num_tokens = 257
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _tokens(count: int) -> LLTokenizer:
    tokens = TokenizerWrapper(_Bytes())
    tokens.tokens = [*_Bytes.tokens, *[b""] * (count - _Bytes.num_tokens)]
    return LLTokenizer(tokens, n_vocab=len(tokens.tokens), eos_token=[_Bytes.eos_token_id])


def _answer(question: Try) -> Tried:
    grammar, tokens = Grammar(question.grammar), _tokens(question.num_tokens)

    def error_of(each: Grammar) -> str:
        matcher = matcher_of(each, tokens, question.max_states)
        if not matcher.is_error():
            _walk(matcher, tokens.vocab_size)
        return " ".join(matcher.get_error().partition("<non-verbose")[0].split())

    error = error_of(grammar)
    return Tried(error, _location(grammar, error, error_of) if error else "")


def _walk(matcher: LLMatcher, vocab_size: int) -> None:
    words = np.zeros(-(-vocab_size // 32), np.int32)
    choose = random.Random(0).choice
    for _ in range(NUM_STEPS):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.is_stopped() or not allowed.size:
            return
        matcher.consume_token(choose(allowed.tolist()))


def _location(grammar: Grammar, error: str, error_of: Callable[[Grammar], str]) -> str:
    schemas = [part["json_schema"] for part in grammar.parts if part.get("json_schema") is not None]
    if len(schemas) != 1:
        return ""
    until = time.process_time() + MAX_SEARCH_S

    def error_of_part(schema: object) -> str | None:
        if time.process_time() > until:
            return None
        try:
            return error_of(json_grammar(json.dumps(schema)))
        except GrammarError:
            return None

    return fault_in(schemas[0], error, error_of_part) if error_of_part(schemas[0]) == error else ""


if __name__ == "__main__":
    sys.exit(main())
