"""The demo tasks: every answer recomputed in another way, the split, the tokenizer, and the shipped files."""

import calendar
import json
import random
import re
import string
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
import sentencepiece
from demo_training import facts
from demo_training.question import ADJECTIVES, DAYS, MONTHS, NATO, VERBS, WORDS, Question
from demo_training.tasks import KINDS, LONG_KINDS, generate_questions, question_set
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.fakes import DEMO_FOLDER as FOLDER


@pytest.fixture(scope="module")
def processor() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tokenizer.model"))


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def listed_words(question: Question) -> list[str]:
    assert question.input.endswith(".")
    return question.input[:-1].split(" ")


def subtraction(question: Question) -> str:
    first, second = numbers(question.prompt)
    return str(second - first if question.prompt.startswith("Subtract") else first - second)


def insertion_sorted(words: list[str]) -> list[str]:
    result: list[str] = []
    for word in words:
        index = sum(other < word for other in result)
        result.insert(index, word)
    return result


def pick_word(question: Question) -> str:
    words = listed_words(question)
    ordinals = {"first": 0, "second": 1, "third": 2, "fourth": 3, "fifth": 4, "last": len(words) - 1}
    [index] = [index for ordinal, index in ordinals.items() if f" {ordinal} " in question.instruction]
    return words[index]


def sequence(question: Question) -> str:
    rows = {"day": list(calendar.day_name), "month": list(calendar.month_name)[1:], "letter": string.ascii_uppercase}
    [row] = [row for name, row in rows.items() if f" {name} " in question.prompt]
    item = question.prompt[:-1].split(" ")[-1]
    forwards = "after" in question.prompt or "follows" in question.prompt
    return row[(row.index(item) + (1 if forwards else -1)) % len(row)]


def fact(question: Question) -> str:
    answers = {
        answer
        for table in (facts.CAPITALS, facts.SOUNDS, facts.YOUNG, facts.COLOURS, facts.OPPOSITES)
        for subject, answer in table.items()
        if re.search(rf"\b{subject}\b", question.prompt) and phrased_for(table, question.prompt)
    }
    [answer] = answers
    return answer


def phrased_for(table: dict[str, str], prompt: str) -> bool:
    marks = {"capital": facts.CAPITALS, "sound": facts.SOUNDS, "colour": facts.COLOURS, "opposite": facts.OPPOSITES}
    return next((marked for mark, marked in marks.items() if mark in prompt), facts.YOUNG) is table


def numbers_rise(question: Question) -> bool:
    first, last = numbers(question.prompt)
    return first < last


def count_up(question: Question) -> str:
    first, last = numbers(question.prompt)
    text = str(first)
    while first < last:
        first += 1
        text += f", {first}"
    return text


def count_down(question: Question) -> str:
    first, last = numbers(question.prompt)
    return ", ".join(reversed([str(number) for number in range(last, first + 1)]))


def times_table(question: Question) -> str:
    [number] = numbers(question.prompt)
    product, lines = 0, []
    for factor in range(1, 21):
        product += number
        lines.append(f"{factor} x {number} = {product}")
    return "\n".join(lines)


def nato_alphabet(question: Question) -> str:
    found = re.search(r"from ([A-Z]) to ([A-Z])", question.prompt)
    first, last = found.groups() if found else ("A", "Z")
    return "\n".join(f"{word[0]} as in {word}" for word in NATO if first <= word[0] <= last)


def months(question: Question) -> str:
    year = 2024 if "leap" in question.prompt else 2023
    names = list(calendar.month_name)
    month = names.index(question.prompt[:-1].split(" ")[-1])
    lines = []
    for _ in range(12):
        lines.append(f"{names[month]} is month {month} and has {calendar.monthrange(year, month)[1]} days")
        month = month % 12 + 1
    return "\n".join(lines)


def rhyme(question: Question) -> str:
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    asked, plural = re.search(r"(\w+) little (\w+)\.$", question.prompt).groups()
    singular = {"leaves": "leaf"}.get(plural, plural[:-1])
    names = [f"{word} little {singular if word == 'one' else plural}" for word in words]
    start = int(asked) if asked.isdigit() else words.index(asked)
    text = ""
    while start:
        text += f"{names[start].capitalize()} waiting by the bay,\nthe wind came by and took one away,\n"
        start -= 1
        text += f"and {names[start]} stayed to play.\n"
    return text.rstrip("\n")


RECOMPUTED: dict[str, Callable[[Question], str]] = {
    "addition": lambda question: str(sum(numbers(question.prompt))),
    "subtraction": subtraction,
    "multiplication": lambda question: str(numbers(question.prompt)[0] * numbers(question.prompt)[1]),
    "comparison": lambda question: str(sorted(numbers(question.prompt))["larger" in question.prompt]),
    "reverse_words": lambda question: " ".join(listed_words(question)[::-1]),
    "sort_words": lambda question: " ".join(insertion_sorted(listed_words(question))),
    "count_words": lambda question: str(question.input.count(" ") + 1),
    "pick_word": pick_word,
    "copy_sentence": lambda question: question.input,
    "sequence": sequence,
    "fact": fact,
    "short_count": lambda question: (count_up if numbers_rise(question) else count_down)(question),
    "count_up": count_up,
    "count_down": count_down,
    "times_table": times_table,
    "nato_alphabet": nato_alphabet,
    "months": months,
    "rhyme": rhyme,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held_out", [True, False])
def test_demo_answer_equals_the_one_recomputed_from_the_prompt(kind: str, held_out: bool) -> None:
    for question in generate_questions(7, 60, held_out=held_out, kinds=[kind]):
        assert question.kind == kind
        assert question.is_held_out == held_out
        assert question.output == RECOMPUTED[kind](question)


@pytest.mark.parametrize(
    ("table", "subject", "answer"),
    [
        (facts.CAPITALS, "France", "Paris"),
        (facts.CAPITALS, "Japan", "Tokyo"),
        (facts.SOUNDS, "cow", "moos"),
        (facts.YOUNG, "dog", "puppy"),
        (facts.COLOURS, "grass", "green"),
        (facts.OPPOSITES, "hot", "cold"),
    ],
)
def test_demo_facts_are_correct(table: dict[str, str], subject: str, answer: str) -> None:
    assert table[subject] == answer


def sides_of(kind: str, name: Callable[[Question], Any]) -> dict[Any, set[bool]]:
    """Return the parts of the split that contain questions of a kind with the same key."""
    rng = random.Random(1)
    sides: dict[Any, set[bool]] = {}
    for _ in range(3000):
        question = KINDS[kind](rng)
        sides.setdefault(name(question), set()).add(question.is_held_out)
    assert len(set().union(*sides.values())) == 2
    return sides


@pytest.mark.parametrize("kind", KINDS)
def test_demo_training_and_held_out_prompts_are_disjoint(kind: str) -> None:
    assert all(len(sides) == 1 for sides in sides_of(kind, lambda question: question.prompt).values())


@pytest.mark.parametrize("kind", ["addition", "subtraction", "comparison", "count_up", "count_down"])
def test_demo_held_out_questions_have_operands_not_used_in_training(kind: str) -> None:
    sides = sides_of(kind, lambda question: tuple(sorted(numbers(question.prompt))))
    assert all(len(each) == 1 for each in sides.values())


def test_demo_generation_is_repeatable_and_alternates_kinds() -> None:
    questions = generate_questions(3, 2 * len(KINDS))
    assert questions == generate_questions(3, 2 * len(KINDS))
    assert [question.kind for question in questions] == [*KINDS, *KINDS]


def test_demo_unknown_kind_error_lists_known_kinds() -> None:
    with pytest.raises(ValueError, match=r"`kinds` must be among addition, .* Given: poetry"):
        generate_questions(0, 1, kinds=["poetry"])


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0")))
def test_demo_tokenizer_round_trips_any_text(text: str) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tokenizer.model"))
    assert processor.decode(processor.encode(text)) == text


def test_demo_tokenizer_keeps_newlines_and_splits_digits(processor: sentencepiece.SentencePieceProcessor) -> None:
    assert processor.encode("cat 42\n\ndog", out_type=str)[:6] == ["▁cat", "▁", "4", "2", "\n", "\n"]
    assert processor.decode(processor.encode("two\n\nlines\n")) == "two\n\nlines\n"


def test_demo_words_are_one_token_each(processor: sentencepiece.SentencePieceProcessor) -> None:
    words = [*WORDS, *ADJECTIVES, *VERBS, *DAYS, *MONTHS]
    assert [word for word in words if len(processor.encode(word)) != 1] == []


def test_demo_answer_tokens_follow_prompt_tokens(processor: sentencepiece.SentencePieceProcessor) -> None:
    for question in generate_questions(4, 4 * len(KINDS)):
        prompt_ids = processor.encode(question.prompt)
        assert processor.encode(f"{question.prompt} {question.output}")[: len(prompt_ids)] == prompt_ids


def test_demo_questions_file_equals_the_question_set() -> None:
    written = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))
    assert written == [
        {"task": q.kind, "instruction": q.instruction, "input": q.input, "output": q.output} for q in question_set()
    ]


def test_demo_question_set_is_held_out_distinct_and_has_every_kind() -> None:
    questions = question_set()
    assert all(question.is_held_out for question in questions)
    assert len({question.prompt for question in questions}) == len(questions)
    counts = {kind: sum(question.kind == kind for question in questions) for kind in KINDS}
    assert counts == {kind: 12 if kind in LONG_KINDS else 28 for kind in KINDS}


def test_demo_chat_template_renders_the_question_alone() -> None:
    config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Template(config["chat_template"])
    user = {"role": "user", "content": "What is 1 + 2?"}
    earlier = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user], [*earlier, user]):
        rendered = template.render(messages=messages, bos_token="<s>", add_generation_prompt=True)
        assert rendered == "<s>What is 1 + 2?"


def test_demo_weights_have_the_shapes_of_the_configuration() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    expected = {name: [config["vocab_size"], hidden] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    expected["model.norm.weight"] = [hidden]
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": [hidden],
            "self_attn.q_proj": [q_size, hidden],
            "self_attn.k_proj": [kv_size, hidden],
            "self_attn.v_proj": [kv_size, hidden],
            "self_attn.o_proj": [hidden, q_size],
            "post_attention_layernorm": [hidden],
            "mlp.gate_proj": [intermediate, hidden],
            "mlp.up_proj": [intermediate, hidden],
            "mlp.down_proj": [hidden, intermediate],
        }
        expected |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert shapes == expected
    assert dtypes == {"BF16"}
