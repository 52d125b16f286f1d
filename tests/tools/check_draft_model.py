"""Check a WorkAgent with a draft model that is killed while it serves.

    python tests/tools/check_draft_model.py [--kills N] [--method mtp]

It takes about a minute for each kill on a busy machine. The shipped model is its own draft model, so every draft token
is right, also for sampled answers. `--method mtp`: a small model with a layer for multi-token prediction, whose draft
tokens are often right. Requests, half of
them sampled, run together. The WorkAgent gets SIGKILL while it is asked for draft tokens, and is restarted. Each
answer, log-probabilities included, is compared with that of an engine which runs one request at a time without
speculative decoding. The tool exits with 1 if any answer differs or no draft token was proposed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.config import load_config
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import DraftRequest
from llm_serving.engine.replica import build_engine
from llm_serving.executor.supervisor import SupervisedExecutor, start_work_agent
from llm_serving.offline import LLM
from llm_serving.speculation import DraftModelProposer, SpeculationController
from support.fakes import DEMO_FOLDER, DEMO_TOKENIZER
from support.mtp_models import write_predictable_model

PROMPTS = [
    "Add 17 and 25.",
    "Count from 1 to 30.",
    "Copy this sentence: the quick fox naps.",
    "Sort these words: plum kite ant.",
] * 3
SETTINGS = ["pa_config.num_blocks=256"]
DRAFT = {
    "draft_model": ["scheduler_config.speculative_method=draft_model", "scheduler_config.draft_model_path=demo"],
    "mtp": ["scheduler_config.speculative_method=mtp"],
}
ASKED_BETWEEN_KILLS = 5
LOAD_S = 400.0
KILL_AFTER_S = 0.0005


class KilledExecutor(SupervisedExecutor):
    """An executor that kills its WorkAgent while that proposes draft tokens."""

    kills_left = 0
    num_asked = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.num_asked += 1
        pid = self._agent.process.pid
        if self.kills_left and pid is not None and self.num_asked % ASKED_BETWEEN_KILLS == 0:
            self.kills_left -= 1
            threading.Timer(KILL_AFTER_S, os.kill, (pid, signal.SIGKILL)).start()
        return super().propose(requests)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--method", choices=tuple(DRAFT), default="draft_model")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = Path("demo")
        if arguments.method == "mtp":
            model = Path(folder)
            write_predictable_model(model, DEMO_FOLDER, DEMO_TOKENIZER.vocab_size)
        return check(model, DRAFT[arguments.method], arguments.kills)


def check(model: Path, drafts: Sequence[str], num_kills: int) -> int:
    params = [
        SamplingParams(temperature=1.1 * (index % 2), seed=index, max_tokens=80, logprobs=2, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    llm = LLM(load_config(None, SETTINGS, model))
    reference = [fields_of(llm.generate([prompt], each)[0]) for prompt, each in zip(PROMPTS, params, strict=True)]
    config = load_config(None, [*SETTINGS, *drafts], model)
    # The controller would not use a draft model that is as large as the served model.
    SpeculationController.pays = property(lambda self: True, lambda self, value: None)
    DraftModelProposer.pass_s = property(lambda self: 0.0)
    executor = KilledExecutor(
        lambda like, timeout_s: start_work_agent(config, 0, lambda text: None, like, LOAD_S), 60.0, num_kills + 3
    )
    try:
        executor.kills_left = num_kills
        sizes = {"num_state_slots": config.num_state_slots(llm.model_spec.state_bytes)}
        num_blocks = executor.loaded.num_blocks
        llm.engine = build_engine(config, num_blocks, executor, llm.tokenizer, llm.metrics, llm._publish, **sizes)
        num_equal = 0
        rounds = 0
        while executor.kills_left or not rounds:
            together = [fields_of(output) for output in llm.generate(PROMPTS, params)]
            num_equal += sum(each == other for each, other in zip(together, reference, strict=True))
            rounds += 1
    finally:
        executor.close()
    right = sum(llm.metrics.draft_tokens["vllm:spec_decode_num_accepted_tokens_total"].values())
    sys.stdout.write(
        f"{num_equal} of {rounds * len(PROMPTS)} answers equal, {num_kills} kills, {right} proposals right\n"
    )
    return int(num_equal < rounds * len(PROMPTS) or not right)


def fields_of(output: RequestOutput) -> tuple[object, ...]:
    return output.text, output.token_ids, output.logprobs, output.finish_reason


if __name__ == "__main__":
    sys.exit(main())
