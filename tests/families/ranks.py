"""Greedy answers of small models by two ranks each, in float32, compared with the golden ones.

    PYTHONPATH=tests .venv/bin/python -m families.ranks [NAME ...]

Prints for each model whether all answers equal the golden values, or why it cannot be sharded. Some 10 s each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from families import models
from families.test_exactness import write_tokenizer
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.models.spec import ModelSpec
from llm_serving.network.sharding import sharding_violation
from support.real_replica import RealReplica

SETTINGS = (
    "cluster_config.tensor_parallel=2",
    "model_config.model_dtype=float32",
    "model_config.decode_batch_size=8",
    "scheduler_config.max_prefill_tokens=64",
    "pa_config.num_blocks=200",
    "serving_config.log_level=ERROR",
)
GREEDY = SamplingParams(max_tokens=models.NEW_TOKENS, temperature=0.0, ignore_eos=True)


def verdict(name: str, folder: Path) -> str:
    models.write(name, folder)
    write_tokenizer(folder, models.model(name).config["vocab_size"])
    rule = sharding_violation(ModelSpec.from_folder(folder).network, 2)
    if rule is not None:
        return f"refused: {rule}"
    prompts = models.golden(name).prompts
    replica = RealReplica(*SETTINGS, model=folder)
    try:
        answers = replica.answer([Request(each, prompts[each].token_ids.tolist(), GREEDY) for each in prompts])
    finally:
        replica.close()
    equal = [
        list(answer.token_ids) == prompts[each].generated.tolist()
        for answer, each in zip(answers, prompts, strict=True)
    ]
    return f"{sum(equal)} of {len(equal)} answers equal"


def main(names: list[str]) -> int:
    texts = []
    for name in names or sorted(models.names()):
        with tempfile.TemporaryDirectory() as folder:
            texts.append(verdict(name, Path(folder)))
        sys.stdout.write(f"{name:24} {texts[-1]}\n")
        sys.stdout.flush()
    return 0 if all(each.startswith("refused") or each.split()[0] == each.split()[2] for each in texts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
