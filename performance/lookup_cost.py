"""CPU time of speculative decoding in the master: python performance/lookup_cost.py [--rows 1,8,32,128]

CPU time per step of all calls of the speculation controller, on any machine, loaded or not. No model computes: the
outputs are known, and a step lasts as long as one of so many tokens of the shipped model on two cores of Zen 4.

    noise       random tokens, which no draft predicts
    long        the long answers of the shipped model's questions
    first time  one stream: 24 of those answers, one after the other
    again       the same once more

Tokens per second are by those steps, with the CPU time added and without speculation; of one stream the median of the
answers. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.core.request import FINISHED, RUNNING, Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.scheduler.step_results import num_chosen
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from workload import DEMO_QUESTIONS, load

STEP_S: Final = 0.00052
TOKEN_S: Final = 0.0000655
WAITING_S: Final = 0.00015
"""What a step takes longer for a reply that is waited for, and for each of its rows:"""
WAITING_S_A_ROW: Final = 0.000003
MAX_TOKENS: Final = 384
NOISE_TOKENS: Final = 96
ROUNDS: Final = 6
QUESTIONS: Final = 24
BLOCK_SIZE: Final = 16

Said = tuple[list[int], list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--draft-tokens", type=int, default=16, metavar="N", help="num_speculative_tokens")
    arguments = parser.parse_args(argv)
    rows, most = arguments.rows, arguments.draft_tokens
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    questions = [each for each in load(DEMO_QUESTIONS) if len(each.reference) > 100]
    long = [(tokenizer.encode(each.text), tokenizer.encode(each.reference, False)[:MAX_TOKENS]) for each in questions]
    rng = random.Random(0)
    for num_rows in rows:
        noise = [[_noise(rng, tokenizer.vocab_size) for _ in range(num_rows)] for _ in range(ROUNDS)]
        _show(f"noise {num_rows}", noise, most)
    for num_rows in rows:
        shifted = [[long[(3 * turn + row) % len(long)] for row in range(num_rows)] for turn in range(ROUNDS)]
        _show(f"long {num_rows}", shifted, most)
    run = _Run(most)
    for name in ("first time", "again"):
        _show_one_stream(name, run, long[:QUESTIONS])
    return 0


def _noise(rng: random.Random, vocab_size: int) -> Said:
    drawn = [rng.randrange(3, vocab_size) for _ in range(32 + NOISE_TOKENS)]
    return drawn[:32], drawn[32:]


def _show(name: str, rounds: Sequence[Sequence[Said]], most: int) -> None:
    run = _Run(most)
    for texts in rounds:
        run.say(texts)
    num_tokens = sum(len(answer) for texts in rounds for _, answer in texts)
    plain_s = sum(_plain_s([len(answer) for _, answer in texts]) for texts in rounds)
    print(
        f"{name:9} {1e6 * run.cpu_s / run.num_steps:6.1f} us a step, {100 * run.cpu_s / run.steps_s:.2f} % of it;"
        f" {num_tokens / plain_s:6.0f} tok/s without, {num_tokens / (run.steps_s + run.cpu_s):6.0f} with drafts;"
        f" {run.num_draft_tokens} draft tokens, {run.num_accepted} accepted",
        flush=True,
    )


def _show_one_stream(name: str, run: _Run, texts: Sequence[Said]) -> None:
    ratios, a_step = [], []
    for text in texts:
        num_steps, seconds = run.num_steps, run.cpu_s + run.steps_s
        run.say([text])
        ratios.append(_plain_s([len(text[1])]) / (run.cpu_s + run.steps_s - seconds))
        a_step.append(len(text[1]) / (run.num_steps - num_steps))
    print(
        f"{name:10} {statistics.median(a_step):5.2f} tokens a step, {statistics.median(ratios):.2f} x"
        f" ({min(ratios):.2f}-{max(ratios):.2f}); mean {statistics.mean(ratios):.2f} x",
        flush=True,
    )


def _plain_s(lengths: Sequence[int]) -> float:
    """Seconds for answers of these lengths, generated together without drafts."""
    return sum(STEP_S + TOKEN_S * sum(length > step for length in lengths) for step in range(max(lengths)))


class _Run:
    """Answers generated together, round after round, with the drafts of one controller."""

    def __init__(self, most: int) -> None:
        self._controller = SpeculationController(most, NgramProposer(3, clock=time.thread_time), clock=time.thread_time)
        self._ids = count()
        self.num_steps = self.num_draft_tokens = self.num_accepted = 0
        self.cpu_s = self.steps_s = 0.0

    def say(self, texts: Sequence[Said]) -> None:
        live: dict[Request, list[int]] = {}
        for prompt, answer in texts:
            sampling = SamplingParams(max_tokens=len(answer) + 1)
            request = Request(f"request-{next(self._ids)}", prompt, sampling, status=RUNNING)
            live[request] = answer
        began = time.thread_time()
        for request in live:
            self._controller.add_request(request)
        self.cpu_s += time.thread_time() - began
        while live:
            self._step(live)

    def _step(self, live: dict[Request, list[int]]) -> None:
        controller, num_rows = self._controller, len(live)
        for request in live:
            request.num_computed_tokens = request.num_tokens - bool(request.output_token_ids)
        began = time.thread_time()
        waits = controller.pays
        proposed = controller.propose(num_rows, synchronous=waits)
        self.cpu_s += time.thread_time() - began
        drafts = {each: within for each, ids in proposed if (within := ids[: -each.num_tokens % BLOCK_SIZE])}
        num_tokens = num_rows + sum(map(len, drafts.values()))
        seconds, waiting_s = STEP_S + TOKEN_S * num_tokens, WAITING_S + WAITING_S_A_ROW * num_rows
        self.steps_s += seconds + waits * waiting_s
        accepted, ended = {}, []
        for request, answer in live.items():
            position, draft = len(request.output_token_ids), drafts.get(request, [])
            tokens = answer[position : position + len(draft) + 1]
            chosen = num_chosen(draft, tokens)
            request.output_token_ids += tokens[:chosen]
            if draft:
                accepted[request] = chosen - 1
            if len(request.output_token_ids) == len(answer):
                request.status = FINISHED
                ended.append(request)
        for request in ended:
            del live[request]
        began = time.thread_time()
        controller.record_step_time(num_tokens, seconds, waiting_s)
        for request, num_accepted in accepted.items():
            controller.record_verified(request, len(drafts[request]), num_accepted)
        controller.record_step(ended, num_rows)
        self.cpu_s += time.thread_time() - began
        self.num_steps += 1
        self.num_draft_tokens += sum(map(len, drafts.values()))
        self.num_accepted += sum(accepted.values())


if __name__ == "__main__":
    sys.exit(main())
