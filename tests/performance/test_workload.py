import json
import statistics

import pytest
from load_test import workload
from load_test.workload import DatasetError, Prompt


def test_prompt_is_the_instruction_then_the_input(tmp_path):
    path = tmp_path / "prompts.json"
    items = [
        {"instruction": "Sort these words:", "input": "b a.", "output": "a b", "task": "sort"},
        {"instruction": "Say hello.", "input": "", "output": "hello"},
        {"instruction": "Say nothing."},
    ]
    path.write_text(json.dumps(items))
    assert workload.load(path) == [
        Prompt("Sort these words: b a.", "a b", "sort"),
        Prompt("Say hello.", "hello"),
        Prompt("Say nothing."),
    ]


def test_output_is_the_expected_answer_only_with_a_task():
    assert Prompt("p", "42", "sums").expected == "42"
    assert Prompt("p", "something like it").expected is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a list of at least one prompt"),
        ("{}", "must hold a list of at least one prompt"),
        ('["p"]', "item 0 must be an object with `instruction`. Given: p"),
        ('[{"instruction": "p"}, {"instruction": 7}]', "item 1: `instruction` must be a string. Given: 7"),
        ('[{"instruction": " "}]', "item 0: `instruction` and `input` must not both be empty"),
    ],
)
def test_invalid_prompt_set_error_names_file_item_and_rule(tmp_path, content, message):
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=message) as error:
        workload.load(path)
    assert str(path) in str(error.value)


def test_missing_prompt_set_error_has_the_command_that_creates_one(tmp_path):
    with pytest.raises(DatasetError, match=r"No such file or directory. `--dataset alpaca-like` generates one"):
        workload.load(tmp_path / "none.json")


def test_prompt_choice_is_seeded_and_repeats_only_after_all_prompts():
    prompts = [Prompt(str(number)) for number in range(10)]
    chosen = workload.choose(prompts, 25, seed=1)
    assert chosen == workload.choose(prompts, 25, seed=1)
    assert chosen != workload.choose(prompts, 25, seed=2)
    assert set(chosen[:10]) == set(chosen[10:20]) == set(prompts)
    assert len(set(chosen[20:])) == 5


@pytest.mark.parametrize(
    ("prompt", "num_reference_tokens", "expected"),
    [
        (Prompt("p"), None, 300),
        (Prompt("p", "one two", "task"), 2, 3),
        (Prompt("p", "one two"), 2, 2),
        (Prompt("p", "héllo", "task"), None, 8),
        (Prompt("p", "word " * 10), None, 21),
        (Prompt("p", " "), 0, 1),
    ],
)
def test_max_tokens_follows_the_expected_answer(prompt, num_reference_tokens, expected):
    assert workload.max_tokens(prompt, num_reference_tokens) == expected


def test_alpaca_like_prompts_depend_on_their_seed():
    assert workload.generate_alpaca_like(20, seed=1) == workload.generate_alpaca_like(20, seed=1)
    assert workload.generate_alpaca_like(20, seed=1) != workload.generate_alpaca_like(20, seed=2)


def test_alpaca_like_prompts_have_the_lengths_of_the_data_set():
    items = workload.generate_alpaca_like(5000, seed=1)
    outputs = [len(item["output"].split()) for item in items]
    assert 33 <= statistics.median(outputs) <= 39
    assert min(outputs) >= 1
    assert max(outputs) == 380
    assert 0.37 <= sum(bool(item["input"]) for item in items) / len(items) <= 0.43
    assert 9 <= statistics.median(len(item["instruction"].split()) for item in items) <= 11
