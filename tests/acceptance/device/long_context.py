"""Check prompts near the longest context: the same log-probabilities by decoding and by computing the prompt again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from acceptance.device.outcome import Outcome, table
from acceptance.device.server import Answer, Server, ask

TITLE = "Contexts near the limit"
NUM_TOKENS = 8
LONGEST = 32768
"""Longest prompt that is sent, in tokens."""
LIMITS = {"float16": 0.1, "bfloat16": 0.4}
"""Maximum difference of a log-probability."""

Ask = Callable[..., list[Answer]]


def examine(server: Server, dtype: str, vocab_size: int, ask: Ask = ask) -> Outcome:
    """Generate tokens after prompts of three lengths up to the limit, then send each prompt again with these tokens.

    Decode steps compute a token first, and chunks of a prompt compute it again. Prompts are random tokens, so that the
    next token depends on all of them.

    Raises:
        PartError: The server cannot answer.
    """
    longest = min(server.longest(), LONGEST) - NUM_TOKENS - 1
    rows: list[Sequence[object]] = []
    faults = []
    for length in (longest // 4, longest // 2, longest):
        prompt = random.Random(length).choices(range(vocab_size // 8, vocab_size), k=length)
        greedy = {"temperature": 0, "logprobs": 0, "ignore_eos": True}
        (decoded,) = ask(server.url, [{"prompt": prompt, "max_tokens": NUM_TOKENS, **greedy}])
        tokens = decoded.token_ids
        bodies = [{"prompt": [*prompt, *tokens[:at]], "max_tokens": 1, **greedy} for at in range(1, NUM_TOKENS)]
        again = ask(server.url, bodies)
        off = [abs(one.logprobs[0] - logprob) for one, logprob in zip(again, decoded.logprobs[1:], strict=True)]
        same = sum(one.token_ids[0] == token for one, token in zip(again, tokens[1:], strict=True))
        rows.append((length, f"{max(off):.3f}", f"{same} of {len(again)}"))
        if not max(off) <= LIMITS[dtype]:
            faults.append(
                f"{length} tokens: log-probabilities of decode steps and of prompts differ by {max(off):.2f}; "
                f"{LIMITS[dtype]} is allowed in {dtype}"
            )
    lines = table(("tokens of the prompt", "largest difference", "same tokens"), rows)
    return Outcome(TITLE, lines, faults)
