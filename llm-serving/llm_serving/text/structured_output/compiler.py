"""Compiles grammars for one tokenizer, within limits, and caches the latest ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llm_serving.errors import TransportError
from llm_serving.text.sandbox import ConfinedPool, ConfinedProcess
from llm_serving.text.structured_output.grammar_process import MODULE, Tried, Try
from llm_serving.text.structured_output.grammars import Grammar, GrammarError
from llm_serving.text.structured_output.matcher import TokenConstraint, matcher_of

if TYPE_CHECKING:  # not imported in a grammar process, which would take twice as long to start
    from llm_serving.text.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
NUM_PROCESSES: Final = 2
"""With two processes that compile grammars as a trial, one slow grammar does not block the others."""
MAX_CPU_S: Final = 2.0
STACK_BYTES: Final = 2**25
"""Stack size in bytes of compiling threads. The confined process that tries each grammar first has a smaller stack."""
MAX_ERROR_CHARS: Final = 400
_THREAD_START: Final = threading.Lock()
"""Held while a thread starts with a large stack, because the stack size is a global setting."""


class _Tokens:
    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], token_bytes: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = token_bytes
        # A token that ends an output is never part of a text.
        special = tokenizer.delimiter_ids.union(end_ids)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < len(token_bytes))

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    max_bytes: int = 2**16
    max_states: int = 20_000
    """Maximum number of lexer states of a request. A state takes 1 to 2 KB."""
    num_kept: int = 64


class CostlyGrammarError(GrammarError):
    """A grammar exceeded the time or memory limit. A retry may succeed when the machine is less busy."""


class ConstraintCompiler:
    """Compiles grammars to constraints, within limits of size, time and memory. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int, limits: GrammarLimits | None = None
    ) -> None:
        self.limits = GrammarLimits() if limits is None else limits
        self.can_end = bool(end_ids)
        """Whether the model has an end token. Without one, an output could not end when its grammar is complete."""
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._known: OrderedDict[Grammar, Future[TokenConstraint]] = OrderedDict()
        self._lock = threading.Lock()
        self._processes: ConfinedPool[Tried] = ConfinedPool(
            NUM_PROCESSES, lambda: ConfinedProcess(MODULE, MAX_CPU_S, Tried), "that compiles a grammar"
        )

    def compiled(self, grammar: Grammar) -> TokenConstraint:
        """Return the constraint of a grammar, compiled once. Raise GrammarError if it is invalid or too large."""
        self.check_size(grammar.num_bytes)
        with self._lock:
            known = self._known.get(grammar)
            if is_new := known is None:
                known = self._known[grammar] = Future()
            self._known.move_to_end(grammar)
            while len(self._known) > max(self.limits.num_kept, 1):
                self._known.popitem(last=False)
        if is_new:
            try:
                known.set_result(self._compile(grammar))
            except BaseException as error:  # noqa: BLE001  the waiting thread raises it
                known.set_exception(error)
                if type(error) is not GrammarError:  # an invalid grammar has the same error each time
                    with self._lock:
                        self._known.pop(grammar, None)
        return known.result()

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self.limits.max_bytes:
            raise GrammarError(f"must have at most {self.limits.max_bytes} bytes. Given: {num_bytes}")

    def _compile(self, grammar: Grammar) -> TokenConstraint:
        self._try(grammar)

        def compiled() -> LLMatcher:
            return _with_a_large_stack(lambda: matcher_of(grammar, self._table, self.limits.max_states))

        constraint = TokenConstraint(grammar, compiled, self._token_bytes, self._end_ids)
        if constraint.error:
            raise GrammarError(f"cannot be compiled: {_shortened(constraint.error)}")
        return constraint

    def _try(self, grammar: Grammar) -> None:
        try:
            tried = self._processes.ask(Try(grammar.text, self.limits.max_states, self._num_tokens))
        except TransportError:
            rule = "takes too much time or memory to compile; simplify it, or try again later"
            raise CostlyGrammarError(rule) from None
        if tried.error:
            place = f" at {tried.place}" if tried.place else ""
            raise GrammarError(f"cannot be compiled{place}: {_shortened(tried.error)}")

    @cached_property
    def _num_tokens(self) -> int:
        return min(self._tokenizer.vocab_size, self._vocab_size)

    @cached_property
    def _token_bytes(self) -> Sequence[bytes]:
        return [self._tokenizer.token_bytes(token_id) for token_id in range(self._num_tokens)]

    @cached_property
    def _table(self) -> LLTokenizer:
        """The tokenizer in the form that llguidance needs. Making it takes a second for 200,000 tokens."""
        end_ids = [token_id for token_id in sorted(self._end_ids) if token_id < self._num_tokens]
        wrapped = TokenizerWrapper(_Tokens(self._tokenizer, end_ids, self._token_bytes))
        return LLTokenizer(wrapped, n_vocab=self._num_tokens, eos_token=end_ids)


def _with_a_large_stack(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1, "grammar") as executor:
        with _THREAD_START:
            before = threading.stack_size(STACK_BYTES)  # harmless: other threads that start now get it, too
            try:
                done = executor.submit(work)  # starts the thread
            finally:
                threading.stack_size(before)
        return done.result()


def _shortened(error: str) -> str:
    text = " ".join(error.split())
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
