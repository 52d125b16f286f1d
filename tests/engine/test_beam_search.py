"""Beam search against a reference implementation and an exhaustive search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import MAX_BEAM_WIDTH, BeamSearchParams
from llm_serving.engine.beam_search import BeamSearch, LikelyTokens
from llm_serving.errors import RequestError

STOP = 3


class TinyModel:
    """Random log-probabilities of `vocab_size` tokens after every sequence."""

    def __init__(self, seed: int, vocab_size: int = 5) -> None:
        self._seed = seed
        self.vocab_size = vocab_size

    def logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        logits = 2 * np.random.default_rng([self._seed, *token_ids]).normal(size=self.vocab_size)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32).tolist()

    def likely(self, token_ids: tuple[int, ...], count: int) -> LikelyTokens:
        logprobs = self.logprobs(token_ids)
        ranked = sorted(range(self.vocab_size), key=lambda token_id: -logprobs[token_id])[:count]
        return LikelyTokens(ranked, [logprobs[token_id] for token_id in ranked])

    def sequences(self, max_tokens: int) -> dict[tuple[int, ...], float]:
        """Return the log-probability of every sequence that ends by STOP or has `max_tokens` tokens."""
        found = {}
        for length in range(1, max_tokens + 1):
            for tokens in itertools.product(range(self.vocab_size), repeat=length):
                if STOP not in tokens[:-1] and (tokens[-1] == STOP or length == max_tokens):
                    found[tokens] = sum(self.logprobs(tokens[:i])[token] for i, token in enumerate(tokens))
        return found


def run(model: TinyModel, params: BeamSearchParams, max_tokens: int) -> tuple[BeamSearch, int]:
    """Run a search to its end; return it with the number of its steps."""
    search, steps = BeamSearch(params, max_tokens, {STOP}), 0
    while not search.has_ended:
        before = [_ids(beam) for beam in search.live]
        origins = search.advance([model.likely(ids, 2 * params.width) for ids in before])
        assert [_ids(beam)[:-1] for beam in search.live] == [before[origin] for origin in origins]
        steps += 1
    return search, steps


def _ids(hypothesis) -> tuple[int, ...]:
    return tuple(token.token_id for token in hypothesis.tokens())


def answers(search: BeamSearch) -> list[tuple[int, ...]]:
    return [_ids(beam.hypothesis) for beam in search.best()]


def beam_search(model: TinyModel, params: BeamSearchParams, max_tokens: int) -> list[tuple[tuple[int, ...], float]]:
    """A reference implementation with plain lists and without early stopping."""
    live, finished = [((), 0.0)], []
    for _ in range(max_tokens):
        grown = []
        for tokens, total in live:
            likely = model.likely(tokens, 2 * params.width)
            grown += [((*tokens, t), total + p) for t, p in zip(*likely, strict=True)]
        grown.sort(key=lambda each: -each[1])
        finished += [each for each in grown if each[0][-1] == STOP]
        live = [each for each in grown if each[0][-1] != STOP][: params.width]
    finished += live
    scored = [(tokens, total / len(tokens) ** params.length_penalty) for tokens, total in finished]
    return sorted(scored, key=lambda each: -each[1])[: params.num_returned]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3, 10])
def test_beam_search_equals_an_exhaustive_implementation_and_early_stopping_changes_nothing(width, length_penalty):
    params = BeamSearchParams(width=width, num_returned=width, length_penalty=length_penalty)
    num_early = 0
    for seed in range(30):
        search, steps = run(TinyModel(seed), params, 5)
        expected = beam_search(TinyModel(seed), params, 5)
        assert answers(search) == [tokens for tokens, _ in expected]
        assert [beam.score for beam in search.best()] == [score for _, score in expected]
        num_early += steps < 5
    if length_penalty <= 0 and width < 10:
        assert num_early > 0


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beam_search_wide_enough_finds_the_best_sequence(length_penalty):
    # Of three tokens besides the stop id nine sequences of two can be made: all of them go on.
    for seed in range(20):
        model = TinyModel(seed, vocab_size=4)
        params = BeamSearchParams(width=9, num_returned=9, length_penalty=length_penalty)
        search, _ = run(model, params, 3)
        scores = {tokens: total / len(tokens) ** length_penalty for tokens, total in model.sequences(3).items()}
        best = sorted(scores, key=lambda tokens: -scores[tokens])[:9]
        assert answers(search) == best


def test_beam_search_of_width_one_is_greedy():
    for seed in range(20):
        model, tokens = TinyModel(seed), ()
        while len(tokens) < 6 and STOP not in tokens:
            tokens = (*tokens, model.likely(tokens, 1).token_ids[0])
        search = BeamSearch(BeamSearchParams(width=1, length_penalty=0.0), 6, {STOP})
        while not search.has_ended:
            search.advance([model.likely(_ids(search.live[0]), 1)])
        assert answers(search) == [tokens]


def test_beam_search_breaks_ties_by_beam_and_rank():
    half = math.log(0.5)
    search = BeamSearch(BeamSearchParams(width=2, num_returned=2), 2, {STOP})
    assert search.advance([LikelyTokens([7, 5], [half, half])]) == [0, 0]
    search.advance([LikelyTokens([9, 8], [half, half]), LikelyTokens([1, 2], [half, half])])
    assert answers(search) == [(7, 9), (7, 8)]
    assert [beam.finish_reason for beam in search.best()] == [FinishReason.LENGTH] * 2


def test_beam_search_early_stopping_ends_with_the_first_finished_sequences():
    lazy = BeamSearchParams(width=1, early_stopping=True)
    search = BeamSearch(lazy, 10, {STOP})
    search.advance([LikelyTokens([0, STOP], [-0.1, -3.0])])
    assert answers(search) == [(STOP,)]
    patient = BeamSearch(BeamSearchParams(width=1), 10, {STOP})
    assert patient.advance([LikelyTokens([0, STOP], [-0.1, -3.0])]) == [0]


def test_beam_search_ends_when_all_candidates_are_stop_tokens():
    search = BeamSearch(BeamSearchParams(width=2, num_returned=2), 10, {3, 4})
    assert search.advance([LikelyTokens([3, 4], [-0.5, -1.0])]) == []
    assert [beam.finish_reason for beam in search.best()] == [FinishReason.STOP] * 2


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("best_of", {"width": 0}),
        ("best_of", {"width": MAX_BEAM_WIDTH + 1}),
        ("n", {"num_returned": 0}),
        ("n", {"num_returned": 4}),
        ("length_penalty", {"length_penalty": math.nan}),
        ("length_penalty", {"length_penalty": -11.0}),
    ],
)
def test_beam_search_params_out_of_range_are_refused(field, changes):
    with pytest.raises(RequestError, match=f"{field}.*Given: {next(iter(changes.values()))}"):
        BeamSearchParams(**{"width": 3, **changes})
