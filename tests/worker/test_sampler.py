import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.errors import KernelError, WorkerError
from llm_serving.kernels import library
from llm_serving.worker import sampler, sampling_reference
from llm_serving.worker.model_inputs import NO_TOKENS
from llm_serving.worker.sampler import SamplingCheck, check_sampling, sample
from msgspec.structs import replace
from support.step_factories import sampling_input, select_samples

NAN, INF = math.nan, math.inf


def choose(logits, previous=NO_TOKENS, choose_tokens=sampling_reference.choose_tokens, **fields):
    """Return the output of step 3 for rows of logits."""
    logits = np.array(logits, np.float32)
    sampling = fields.pop("sampling", None) or sampling_input(len(logits), **fields)
    check_sampling(sampling, logits.shape[1])
    return sample(3, logits, sampling, np.array(previous, np.int32), choose_tokens)


def tokens(logits, **fields):
    return choose(logits, **fields).token_ids.tolist()


def frequencies(logits, draws=20_000, **fields):
    """Return how often each token of one row of logits is sampled, over as many positions.

    Uses the library if possible: NumPy would take seconds, and tests/kernels/test_sampling.py compares the two.
    """
    try:
        library.load()
        fields["choose_tokens"] = sampler.LibrarySampler()
    except KernelError:
        pass
    rows = np.broadcast_to(np.array(logits, np.float32), (draws, len(logits))).copy()
    chosen = choose(rows, position=np.arange(draws), **{"temperature": 1, **fields}).token_ids
    return np.bincount(chosen, minlength=len(logits)) / draws


def test_greedy_sampling_breaks_ties_by_the_lowest_id():
    output = choose([[0, 5, 5, 1], [-3, -4, -9, -3]])
    assert output.step == 3
    assert output.token_ids.tolist() == [1, 0]
    assert output.token_ids.dtype == np.int32
    assert output.row_errors == {}


def test_no_samples_give_an_empty_output():
    output = choose(np.zeros((0, 4)))
    assert output.token_ids.tolist() == []
    assert output.top.num_results == 0


def test_logits_are_not_changed():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    fields = {"temperature": [0.7, 0, 1], "repetition_penalty": 2, "top_p": 0.5, "num_logprobs": 3}
    sample(0, logits, sampling_input(3, history={0: [1, 2]}, bias={1: {3: 9.0}}, **fields), NO_TOKENS)
    assert (logits == before).all()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_row_without_a_choice_fails_alone(bad):
    output = choose([[1, 2], [bad, 2], [3, 2]], num_logprobs=0)
    assert output.token_ids.tolist() == [1, -1, 0]
    assert list(output.row_errors) == [1]
    assert f"no token can be sampled: the largest logit is {bad}" in output.row_errors[1]
    assert output.logprobs[0] == pytest.approx(-math.log1p(math.exp(-1)))


def test_a_row_of_minus_infinity_is_an_error():
    assert list(choose([[-INF, -INF]], temperature=1).row_errors) == [0]


def test_nan_row_does_not_change_other_rows():
    logits = np.random.default_rng(1).normal(size=(3, 40))
    logits[1, 7] = NAN
    together = choose(logits, temperature=1, seed=[1, 2, 3])
    assert together.token_ids[1] == -1
    assert together.token_ids[[0, 2]].tolist() == tokens(logits[[0, 2]], temperature=1, seed=[1, 3])


def test_sampling_frequencies_follow_the_softmax_of_logits_over_temperature():
    logits = np.array([1.0, 0.0, -1.0, 2.5])
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        # Four standard deviations of a frequency over 20,000 samples are at most 0.0142.
        np.testing.assert_allclose(frequencies(logits, temperature=temperature), expected, atol=0.0142)


def test_sampling_frequencies_over_a_larger_vocabulary_follow_the_softmax():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=300)
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(frequencies(logits), expected, atol=4 * math.sqrt(expected.max() / 20_000))


def test_a_forbidden_token_is_never_drawn():
    assert frequencies([0, -INF, 0, -INF])[[1, 3]].tolist() == [0, 0]


def test_top_k_breaks_ties_by_the_lowest_id():
    assert (frequencies([1, 3, 3, 3, 2], top_k=2) > 0).tolist() == [False, True, True, False, False]


def test_top_k_of_one_is_greedy_at_any_temperature():
    assert tokens([[1, 1.0000001, 0]] * 50, temperature=100, top_k=1, position=np.arange(50)) == [1] * 50


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.4, 0.1, 0.3, 0.2])
    assert (frequencies(logits, top_p=0.35) > 0).tolist() == [True, False, False, False]
    assert (frequencies(logits, top_p=0.65) > 0).tolist() == [True, False, True, False]
    assert (frequencies(logits, top_p=0.75) > 0).tolist() == [True, False, True, True]
    assert (frequencies(logits, top_p=0.95) > 0).tolist() == [True, True, True, True]


def test_top_p_applies_to_the_tokens_that_top_k_keeps():
    # Of 0.4 and 0.3, the first has 0.57 of the weight.
    logits = np.log([0.4, 0.1, 0.3, 0.2])
    assert (frequencies(logits, top_k=2, top_p=0.55) > 0).tolist() == [True, False, False, False]
    np.testing.assert_allclose(frequencies(logits, top_k=2, top_p=0.6), [4 / 7, 0, 3 / 7, 0], atol=0.0142)


def test_min_p_drops_tokens_below_its_share_of_the_likeliest():
    logits = np.log([0.5, 0.26, 0.24])
    assert (frequencies(logits, min_p=0.5) > 0).tolist() == [True, True, False]
    assert (frequencies(logits, min_p=1.0) > 0).tolist() == [True, False, False]


def test_typical_p_keeps_the_tokens_of_most_typical_information():
    """The entropy is 1.09. Tokens have 0.51, 1.61, 2.30 and 2.30 nats, so the second one is the most typical."""
    logits = np.log([0.6, 0.2, 0.1, 0.1])
    assert (frequencies(logits, typical_p=0.15) > 0).tolist() == [False, True, False, False]
    assert (frequencies(logits, typical_p=0.5) > 0).tolist() == [True, True, False, False]
    assert (frequencies(logits, typical_p=0.85) > 0).tolist() == [True, True, True, False]
    assert (frequencies(logits, typical_p=0.95) > 0).tolist() == [True, True, True, True]
    np.testing.assert_allclose(frequencies(logits, typical_p=0.5), [0.75, 0.25, 0, 0], atol=0.0142)


def test_typical_p_applies_to_the_tokens_that_other_filters_keep():
    logits = np.log([0.6, 0.2, 0.1, 0.1])
    assert (frequencies(logits, top_k=1, typical_p=0.1) > 0).tolist() == [True, False, False, False]
    # Of 0.75 and 0.25 the first is nearer to their mean.
    assert (frequencies(logits, top_p=0.7, typical_p=0.3) > 0).tolist() == [True, False, False, False]


def test_the_smallest_top_p_leaves_the_best_token():
    assert tokens(np.arange(12.0).reshape(2, 6), temperature=50, top_p=1e-30) == [5, 5]


def test_top_p_over_a_flat_vocabulary_keeps_the_lowest_ids():
    share = frequencies(np.zeros(5000), top_p=0.5, draws=2_000)
    assert share[:2500].sum() == 1


def test_the_same_seed_and_position_give_the_same_token():
    logits = np.zeros((4, 1000))
    first = tokens(logits, temperature=1, seed=[1, 1, 2, 1], position=[5, 5, 5, 6])
    assert first[0] == first[1]
    assert len(set(first)) == 3


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    # Token 0: 3 / 2 = 1.5. Token 1: -1 * 2 = -2. The number of occurrences in the history does not matter.
    assert tokens([[3, -1, 1.6]], repetition_penalty=2, history={0: [0, 0, 1]}) == [2]
    assert tokens([[3, -1, 1.4]], repetition_penalty=2, history={0: [0, 0, 1]}) == [0]
    assert tokens([[-9, -1, -1.9]], repetition_penalty=2, history={0: [1]}) == [2]


def test_presence_and_frequency_penalties_depend_on_the_output_only():
    history = {0: [0, 0, 1, 1]}
    assert tokens([[5, 3]], presence_penalty=2, history=history, history_prompt_lens=2) == [0]
    assert tokens([[3, 4.5]], presence_penalty=2, history=history, history_prompt_lens=2) == [0]
    assert tokens([[3, 5]], presence_penalty=1.5, history=history, history_prompt_lens=2) == [1]
    assert tokens([[3, 5]], frequency_penalty=1.1, history=history, history_prompt_lens=2) == [0]


def test_a_history_may_end_in_a_token_of_the_previous_step():
    assert tokens([[5, 4]], presence_penalty=2, history={0: [-2]}, previous=[9, 0]) == [1]


def test_bias_can_forbid_and_force_tokens():
    assert tokens([[5, 4, 3]] * 2, bias={0: {0: -INF}, 1: {2: 100.0, 0: -100.0}}) == [1, 2]


def test_bias_that_forbids_everything_is_an_error_of_its_row():
    output = choose([[5, 4]] * 2, bias={0: {0: -INF, 1: -INF}}, temperature=1)
    assert output.row_errors == {0: "penalties, bias and allowed tokens leave no token to sample"}
    assert output.token_ids[0] == -1


def test_logprobs_are_of_the_unmodified_distribution():
    logits = np.array([[1.0, 3.0, 2.0]])
    output = choose(logits, temperature=9, num_logprobs=2, bias={0: {1: -INF, 2: -INF}})
    exact = logits[0] - np.log(np.exp(logits[0]).sum())
    assert output.token_ids.tolist() == [0]
    assert output.logprobs == pytest.approx(exact[[0]], abs=1e-6)
    assert output.top.token_ids.tolist() == [1, 2]
    assert output.top.logprobs == pytest.approx(exact[[1, 2]], abs=1e-6)


def test_each_row_gets_its_number_of_top_logprobs():
    output = choose([[1, 2, 3]] * 4, num_logprobs=[-1, 2, 0, 1])
    assert output.top.offsets.tolist() == [0, 0, 2, 2, 3]
    assert output.top.token_ids.tolist() == [2, 1, 2]
    assert output.logprobs[0] == 0
    assert output.logprobs[1] == output.top.logprobs[0] == output.logprobs[2]


def test_a_failed_row_has_no_top_logprobs():
    output = choose([[1, 2], [np.nan, 2], [3, 4]], num_logprobs=2)
    assert output.top.offsets.tolist() == [0, 2, 2, 4]


def test_more_logprobs_than_tokens_give_all_tokens():
    assert choose([[1, 2]], num_logprobs=5).top.token_ids.tolist() == [1, 0]


@st.composite
def batches(draw):
    """Return logits of an odd shape, and parameters of every kind mixed."""
    num_samples, vocab_size = draw(st.integers(2, 9)), draw(st.sampled_from([3, 128, 257, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(scale=rng.choice([0.1, 3.0]), size=(num_samples, vocab_size)).astype(np.float32)
    pick = lambda *values: rng.choice(values, num_samples)  # noqa: E731
    sampling = sampling_input(
        num_samples,
        temperature=pick(0, 0.5, 1, 3),
        top_k=pick(0, 0, 1, 2, 40),
        top_p=pick(1, 1, 0.3, 0.9),
        min_p=pick(0, 0, 0.1),
        repetition_penalty=pick(1, 1.3),
        presence_penalty=pick(0, 0.5),
        frequency_penalty=pick(0, -0.2),
        seed=rng.integers(0, 2**63, num_samples).astype(np.uint64),
        position=rng.integers(0, 4096, num_samples),
        num_logprobs=pick(-1, 0, 3),
        history={row: rng.integers(0, vocab_size, 20).tolist() for row in range(0, num_samples, 2)},
        history_prompt_lens=5,
        bias={row: {int(rng.integers(vocab_size)): float(rng.normal())} for row in range(0, num_samples, 3)},
    )
    return logits, sampling


@settings(max_examples=60)
@given(batches())
def test_a_row_is_bitwise_the_same_alone_and_in_a_batch(batch):
    logits, sampling = batch
    together = sample(0, logits, sampling, NO_TOKENS)
    backwards = np.arange(len(logits))[::-1]
    reversed_output = sample(0, logits[backwards].copy(), select_samples(sampling, backwards), NO_TOKENS)
    assert reversed_output.token_ids[backwards].tolist() == together.token_ids.tolist()
    assert reversed_output.logprobs[backwards].tobytes() == together.logprobs.tobytes()
    for row in range(len(logits)):
        reference = sample(0, logits[row : row + 1].copy(), select_samples(sampling, [row]), NO_TOKENS)
        assert reference.token_ids[0] == together.token_ids[row]
        assert reference.logprobs[0].tobytes() == together.logprobs[row].tobytes()
        assert reference.top.of(0) == together.top.of(row)


@settings(max_examples=100)
@given(batches())
def test_random_row_equals_the_reference_sampler(batch):
    """Reference implementation: sort everything, keep prefixes, invert the cumulative sum in float64."""
    logits, sampling = batch
    chosen = sample(0, logits, sampling, NO_TOKENS).token_ids
    for row in np.flatnonzero(sampling.temperature > 0):
        values = _adjusted(logits[row].astype(np.float64), sampling, row)
        order = np.lexsort((np.arange(len(values)), -values))
        weights = np.exp((values[order] - values[order[0]]) / sampling.temperature[row])
        # A tolerance of one millionth covers the float32 arithmetic of the sampler at the limits.
        keep = max(1, (weights >= sampling.min_p[row] * (1 - 1e-6)).sum())
        if sampling.top_k[row] > 0:
            keep = min(keep, sampling.top_k[row])
        cumulative = weights[:keep].cumsum()
        keep = min(keep, int((cumulative < sampling.top_p[row] * cumulative[-1] * (1 + 1e-6)).sum()) + 1)
        floor = values[order[keep - 1]] - 1e-5
        assert values[chosen[row]] >= floor


def _adjusted(values, sampling, row):
    tokens = sampling.history_token_ids[sampling.history_offsets[row] : sampling.history_offsets[row + 1]]
    for token_id in set(tokens.tolist()):
        factor = float(sampling.repetition_penalty[row])
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    output = tokens[sampling.history_prompt_lens[row] :].tolist()
    for token_id in set(output):
        values[token_id] -= sampling.presence_penalty[row] + sampling.frequency_penalty[row] * output.count(token_id)
    for index in range(sampling.bias_offsets[row], sampling.bias_offsets[row + 1]):
        values[sampling.bias_token_ids[index]] += sampling.bias_values[index]
    return values


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"history": {0: [4]}}, "history_token_ids must be below 4"),
        ({"bias": {1: {4: 1.0}}}, "bias_token_ids must be from 0 to 3. Given: 4 to 4"),
        ({"bias": {1: {-1: 1.0}}}, "bias_token_ids must be from 0 to 3. Given: -1 to -1"),
        ({"history": {0: [1]}, "history_prompt_lens": -1}, "history_prompt_lens must be at least 0. Given: -1"),
    ],
)
def test_out_of_range_sampling_arrays_are_rejected(fields, message):
    with pytest.raises(WorkerError, match=message):
        check_sampling(sampling_input(2, **fields), 4)


@pytest.mark.parametrize("field", ["top_k", "seed", "history_prompt_lens", "bias_values"])
def test_sampling_fields_of_another_length_are_rejected(field):
    sampling = sampling_input(2, bias={0: {1: 1.0}})
    with pytest.raises(WorkerError, match=f"{field} must have . entries. Given: 0"):
        check_sampling(replace(sampling, **{field: getattr(sampling, field)[:0]}), 4)


@pytest.mark.parametrize("name", ["history", "bias", "allowed"])
def test_decreasing_offsets_are_rejected(name):
    sampling = replace(sampling_input(2), **{f"{name}_offsets": np.array([0, 5, 0], np.int32)})
    with pytest.raises(WorkerError, match=f"{name}_offsets must divide 0 entries into 2 parts and never decrease"):
        check_sampling(sampling, 4)


def test_a_vocabulary_too_large_for_exact_sums_is_rejected():
    with pytest.raises(WorkerError, match=r"vocab_size must be at most 1048576 to sample\. Given: 1048577"):
        check_sampling(sampling_input(1), 2**20 + 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"top_p": 0}, "top_p must be above 0.0 and at most 1.0. Given: 0.0"),
        ({"top_p": [1, NAN]}, "top_p must be above 0.0 and at most 1.0. Given: nan"),
        ({"temperature": INF}, "temperature must be a number from 0.0 to 100.0. Given: inf"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty must be a number from 0.01 to 100.0. Given: "),
        ({"top_k": -1}, "top_k must be at least 0. Given: -1"),
        ({"num_logprobs": -2}, "num_logprobs must be at least -1. Given: -2"),
        ({"position": -1}, "position must be at least 0. Given: -1"),
        ({"bias": {0: {1: NAN}}}, "bias_values must be at most 100.0. Given: nan"),
        ({"bias": {0: {1: INF}}}, "bias_values must be at most 100.0. Given: inf"),
    ],
)
def test_sampling_parameters_are_checked_again_by_the_worker(fields, text):
    with pytest.raises(WorkerError, match=re.escape(text)):
        check_sampling(sampling_input(2, **fields), 10)


@pytest.mark.parametrize("logits", [[3e38, 1], [-3e38, -3.1e38]])
@pytest.mark.parametrize("penalty", [0.01, 100])
def test_a_penalty_leaves_finite_logits_finite(logits, penalty):
    assert choose([logits], repetition_penalty=penalty, history={0: [0, 1]}).row_errors == {}


class TestAllowedTokens:
    def test_only_allowed_tokens_are_sampled(self):
        logits = np.random.default_rng(0).normal(size=100)
        for allowed in ([3], [31, 32, 33], [64, 99], list(range(100))):
            assert set(np.flatnonzero(frequencies(logits, 500, allowed=dict.fromkeys(range(500), allowed)))) <= {
                *allowed
            }
            greedy = tokens([logits], allowed={0: allowed})
            assert greedy == [max(allowed, key=lambda token: logits[token])]

    def test_rows_without_a_bitmap_sample_from_all_tokens(self):
        assert tokens([[1, 5, 3], [1, 5, 3]], allowed={1: [0, 2]}) == [1, 2]

    def test_a_bias_does_not_allow_a_forbidden_token(self):
        assert tokens([[1, 5, 3]], allowed={0: [0]}, bias={0: {1: 100.0}}) == [0]

    def test_a_row_without_allowed_tokens_fails(self):
        assert list(choose([[1, 5, 3]], allowed={0: [1]}, bias={0: {1: -INF}}).row_errors) == [0]

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"allowed_offsets": [0, 1]}, "allowed_offsets must divide 1 entries into 2 parts"),
            ({"allowed_offsets": [0, 1, 2]}, "allowed_offsets must divide 1 entries into 2 parts"),
            ({"allowed_offsets": [0, 2, 1]}, "allowed_offsets must divide 1 entries into 2 parts and never decrease"),
            ({"allowed_offsets": [0, 0, 2], "allowed_words": [1, 1]}, "allowed_words must have no bits beyond the 10"),
        ],
    )
    def test_bitmaps_longer_than_the_vocabulary_are_rejected(self, change, text):
        arrays = {name: np.array(value, np.int32) for name, value in change.items()}
        with pytest.raises(WorkerError, match=text):
            check_sampling(replace(sampling_input(2, allowed={0: [9]}), **arrays), 10)


def test_repeated_parameters_are_checked_again_only_for_their_positions(monkeypatch):
    check = SamplingCheck(4)
    plain = sampling_input(2)
    check(plain)
    num_checked = []
    monkeypatch.setattr(sampler, "check_allowed", lambda *given: num_checked.append(given))
    check(replace(plain, position=plain.position + np.int32(1)))
    assert not num_checked
    for changed in (replace(plain, top_k=plain.top_k + np.int32(1)), plain, sampling_input(3)):
        check(changed)
    assert len(num_checked) == 3
    with pytest.raises(WorkerError, match="position"):
        check(replace(sampling_input(3), position=np.array([1, -1, 1], np.int32)))
    with pytest.raises(WorkerError, match="position must have 3 entries"):
        check(replace(sampling_input(3), position=np.zeros(2, np.int32)))


def test_parameters_with_lists_are_checked_at_every_step():
    check = SamplingCheck(4)
    biased = sampling_input(1, bias={0: {3: 1.0}})
    check(biased)
    with pytest.raises(WorkerError, match="bias_token_ids"):
        check(replace(biased, bias_token_ids=np.array([4], np.int32)))
