"""Rewritten operations and their integer encoding give the bits of the family's description."""

import numpy as np
import pytest
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from llm_serving.network.builder import Network
from llm_serving.network.program import ProgramMemory, build_program
from llm_serving.network.rewriting import rewrite, select_rows
from support.family_configs import CONFIGS, RandomTensors, config_of
from support.network_reference import parameters, run, run_program, step_of_prompt

TOKENS = [5, 60, 7, 7, 31, 96, 0, 2, 44, 8, 13]


def network(name: str) -> Network:
    config = config_of(name)
    return describe(config["architectures"][0], ConfigReader(config, name))


@pytest.mark.parametrize("name", CONFIGS)
def test_rewriting_and_encoding_change_no_bit(name):
    net = network(name)
    weights = parameters(net, RandomTensors(), 64)
    expected = run(net.operations, weights, step_of_prompt(TOKENS, net, every=True))[-1:]
    short = rewrite(select_rows(net.operations))
    assert np.array_equal(run(short.operations, weights, step_of_prompt(TOKENS, net)), expected)
    program = build_program(net, "float32")
    assert np.array_equal(
        run_program(program, [weights[w] for w in program.weights], step_of_prompt(TOKENS, net)), expected
    )
    assert np.isfinite(expected).all()
    assert expected.std() > 0.01


@pytest.mark.parametrize(
    ("name", "of_a_layer"),
    [("llama", 7), ("qwen3", 7), ("mixtral", 7), ("glm4", 9), ("gemma3", 9), ("baichuan2, 13B", 7)],
)
def test_rewritten_layer_has_the_expected_number_of_instructions(name, of_a_layer):
    program = build_program(network(name), "bfloat16")
    # plus embedding, norm and LM head; rows are selected twice
    assert len(program.instructions) - 1 == 3 * of_a_layer + 3 + 2


def test_select_rows_drops_unsampled_rows_after_the_last_attention():
    plan = select_rows(network("llama").operations)
    kinds = [each.kind for each in plan.operations]
    attend = len(kinds) - 1 - kinds[::-1].index("attention")
    assert kinds[attend + 1] == "select_rows"
    assert all(y in plan.selected for each in plan.operations[attend + 1 :] for y in each.outputs.values())
    assert not any(y in plan.selected for each in plan.operations[: attend + 1] for y in each.outputs.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_program_memory_separates_values_with_overlapping_lifetimes(name):
    plan = rewrite(select_rows(network(name).operations))
    memory = ProgramMemory(plan.operations, 2)
    operations = plan.operations
    last = {x.root: at for at, each in enumerate(operations) for x in each.inputs.values()}
    alive: dict = {}
    for at, each in enumerate(operations):
        for y in each.outputs.values():
            for other in [x for x in alive if last[x] > at]:
                apart = memory.offsets[y] + y.width * 2 <= memory.offsets[other] or (
                    memory.offsets[other] + other.width * 2 <= memory.offsets[y]
                )
                assert apart, f"{y.name} lies on {other.name}"
            if y in last:
                alive[y] = at
    assert memory.bytes_per_row < sum({y: y.width * 2 for each in operations for y in each.outputs.values()}.values())


def test_program_weights_start_with_the_lm_head_and_share_tied_embeddings():
    program = build_program(network("llama, biases, tied"), "bfloat16")
    assert program.weights[0].names == ("model.embed_tokens.weight",)
    assert sum("embed_tokens" in name for weight in program.weights for name in weight.names) == 1
