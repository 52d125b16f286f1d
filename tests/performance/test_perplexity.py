import json
import math

import numpy as np
import pytest
from benchmarks import perplexity


def scores(logprobs, top, agreed):
    return perplexity.Scores(np.array(logprobs), np.array(top, np.int32), np.array(agreed))


def test_perplexity_row_compares_a_format_with_float32():
    reference = scores([-1.0, -2.0, -3.0], [5, 6, 7], [True, True])
    row = perplexity.Row.of(scores([-1.0, -2.5, -3.25], [5, 6, 8], [True, False]), reference)
    assert row.perplexity == pytest.approx(math.exp(2.25))
    assert row.increase == pytest.approx(math.exp(0.25) - 1)
    assert row.standard_error == pytest.approx(math.sqrt((0.25**2 + 0.25**2) / 3 / 3))
    assert (row.greedy, row.top) == (0.5, pytest.approx(2 / 3))
    assert (row.mean_error, row.largest_error) == (0.25, 0.5)


class Letters:
    """A tokenizer of one token a letter, which begins texts with token 1."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def test_perplexity_windows_alternate_between_texts_and_begin_with_bos():
    windows = perplexity.cut(Letters(), ["a" * 1000, "b" * 300], 1200, 301)
    assert [(len(window), window[0], chr(window[1])) for window in windows] == [
        (301, 1, "a"),
        (301, 1, "b"),
        (301, 1, "a"),
        (301, 1, "a"),
    ]


def test_perplexity_prompts_are_pieces_of_the_windows():
    windows = [list(range(500)), list(range(500, 3000))]
    prompts = perplexity.prompts_of(windows)
    assert {len(prompt) for prompt in prompts} == {perplexity.PROMPT_TOKENS}
    assert len({prompt[0] for prompt in prompts}) == perplexity.NUM_PROMPTS
    assert prompts[0] == list(range(64))


def test_perplexity_table_of_the_demo_model_has_a_line_for_each_format(tmp_path, capsys):
    found = tmp_path / "found.json"
    assert perplexity.main(["--tokens", "600", "--formats", "w8a8+kv8", "--json", str(found)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:] == [
        "float32",
        "w8a8+kv8",
    ]
    rows = json.loads(found.read_text())
    assert rows["float32"]["greedy"] == rows["float32"]["top"] == 1.0
    assert 0.9 < rows["w8a8+kv8"]["greedy"] <= 1.0
