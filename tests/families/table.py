"""What every small model is tested with, as a table: prompts, ranks, GGUF files, Ascend.

    PYTHONPATH=tests python -m families.table

docs/results/models.md has the table, and `tests/families/test_table.py` compares both.
"""

from __future__ import annotations

import sys

from families import models
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.gguf_architectures import ARCHITECTURES
from llm_serving.models.registry import architecture_of, describe
from llm_serving.network.quantization import unsupported_by_ascend
from llm_serving.network.sharding import sharded, sharding_violation

RANKS = 2
FILES = {
    "LlamaForCausalLM": "`llama`",
    "InternLM2ForCausalLM": "`internlm2`",
    "InternLM3ForCausalLM": "`llama`",
    "MistralForCausalLM": "`llama`",
    "MixtralForCausalLM": "`llama`",
    "Olmo3ForCausalLM": "`olmo2`",
    "DeepseekV3ForCausalLM": "`deepseek2`",
    "Glm4MoeLiteForCausalLM": "`deepseek2`",
    "PhiMoEForCausalLM": "`phimoe`",
}
"""Family -> `general.architecture` of its GGUF files, where `ARCHITECTURES` does not have the family."""


def row(name: str) -> list[str]:
    """Return the model's name, the lengths of its prompts, what two ranks divide, its GGUF files, and what Ascend
    lacks.
    """
    config, golden = models.model(name).config, models.golden(name)
    family = architecture_of(config, name)
    network = describe(family, ConfigReader(config, name))
    rule = sharding_violation(network, RANKS)
    ranks = "yes" if rule is None else f"no: the number of ranks {rule}"
    if rule is None and sharded(network, 0, RANKS).states != network.states:
        ranks = "yes, with states"
    elif rule is None and network.states:
        ranks = "yes, but states are whole"
    known = [f"`{each}`" for each, about in ARCHITECTURES.items() if about.family == family]
    lacks = unsupported_by_ascend(network, max(golden.prompts) + models.NEW_TOKENS)
    files = FILES.get(family) or ", ".join(known)
    return [name, ", ".join(map(str, golden.prompts)), ranks, files, lacks or "nothing"]


def table() -> str:
    lines = ["| model | prompts | divided by two ranks | GGUF | Ascend lacks |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row(name))} |" for name in models.names())]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
