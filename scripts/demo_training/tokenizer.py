"""The sentencepiece tokenizer: training it, and encoding questions with it."""

import io
import re
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from demo_training.configuration import BOS_ID, EOS_ID, PAD_ID, SEED, VOCAB_SIZE
from demo_training.question import Question
from demo_training.tasks import generate_questions

# Words that no task uses, but questions about lists do.
MORE_WORDS = {"occur", "often"}


def train_tokenizer(folder: Path) -> None:
    """Write `tokenizer.model`: byte pairs are merged until every word of the tasks is one token; digits stay single."""
    texts = [f"{question.prompt} {question.output}" for question in generate_questions(SEED, 36_000, held_out=False)]
    # Each word once, so that merges do not depend on the frequency of words in the tasks.
    words = {word for text in texts for word in re.findall(r"\n?[A-Za-z]+", text)}
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(sorted(words | MORE_WORDS)),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        byte_fallback=True,
        character_coverage=1.0,
        required_chars="".join(chr(code) for code in range(33, 127)),
        user_defined_symbols=["\n"],
        unk_id=0,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=PAD_ID,
        pad_piece="<pad>",
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())


@dataclass(frozen=True)
class Example:
    """Token ids of one question: BOS, prompt, answer, EOS. The answer (with EOS) starts at `answer_start`."""

    token_ids: list[int]
    answer_start: int


class Encoder:
    """Converts questions to token ids with the trained tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

    def encode(self, question: Question) -> Example:
        prompt_ids = self._processor.encode(question.prompt)
        token_ids = self._processor.encode(f"{question.prompt} {question.output}")
        assert token_ids[: len(prompt_ids)] == prompt_ids, question
        return Example([BOS_ID, *token_ids, EOS_ID], len(prompt_ids) + 1)
