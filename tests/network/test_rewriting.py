"""Shorter lists of operations, and their form as integers, give the bits of what a family wrote."""

import numpy as np
import pytest
from llm_serving.models.model_config import Facts
from llm_serving.models.registry import describe
from llm_serving.network.builder import Network
from llm_serving.network.program import Memory, program_of
from llm_serving.network.rewriting import rewrite, select_rows
from support.family_configs import CONFIGS, RandomTensors, config_of
from support.network_reference import parameters, run, run_program, step_of_prompt

TOKENS = [5, 60, 7, 7, 31, 96, 0, 2, 44, 8, 13]


def network(name: str) -> Network:
    config = config_of(name)
    return describe(config["architectures"][0], Facts(config, name))


@pytest.mark.parametrize("name", CONFIGS)
def test_rules_and_integers_change_no_bit(name):
    net = network(name)
    weights = parameters(net, RandomTensors(), 64)
    expected = run(net.operations, weights, step_of_prompt(TOKENS, net, every=True))[-1:]
    short = rewrite(select_rows(net.operations))
    assert np.array_equal(run(short.operations, weights, step_of_prompt(TOKENS, net)), expected)
    program = program_of(net, "float32")
    assert np.array_equal(
        run_program(program, [weights[w] for w in program.weights], step_of_prompt(TOKENS, net)), expected
    )
    assert np.isfinite(expected).all()
    assert expected.std() > 0.01


@pytest.mark.parametrize(
    ("name", "of_a_layer"),
    [("llama", 7), ("qwen3", 7), ("mixtral", 7), ("glm4", 9), ("gemma3", 9), ("baichuan2, 13B", 7)],
)
def test_a_layer_is_so_many_instructions(name, of_a_layer):
    program = program_of(network(name), "bfloat16")
    assert len(program.instructions) - 1 == 3 * of_a_layer + 3 + 2  # and table, norm, head; rows are chosen twice


def test_rows_that_give_no_result_are_left_out_behind_the_last_attention():
    plan = select_rows(network("llama").operations)
    kinds = [each.kind for each in plan.operations]
    attend = len(kinds) - 1 - kinds[::-1].index("attend")
    assert kinds[attend + 1] == "select"
    assert all(y in plan.selected for each in plan.operations[attend + 1 :] for y in each.outputs.values())
    assert not any(y in plan.selected for each in plan.operations[: attend + 1] for y in each.outputs.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_values_that_are_needed_together_lie_apart(name):
    plan = rewrite(select_rows(network(name).operations))
    memory = Memory(plan.operations, 2)
    operations = plan.operations
    last = {x.root: at for at, each in enumerate(operations) for x in each.inputs.values()}
    alive: dict = {}
    for at, each in enumerate(operations):
        for y in each.outputs.values():
            for other in [x for x in alive if last[x] > at]:
                apart = memory.places[y] + y.width * 2 <= memory.places[other] or (
                    memory.places[other] + other.width * 2 <= memory.places[y]
                )
                assert apart, f"{y.name} lies on {other.name}"
            if y in last:
                alive[y] = at
    assert memory.bytes_per_row < sum({y: y.width * 2 for each in operations for y in each.outputs.values()}.values())


def test_tied_tables_are_one_parameter_and_come_first():
    program = program_of(network("llama, biases, tied"), "bfloat16")
    assert program.weights[0].names == ("model.embed_tokens.weight",)
    assert sum("embed_tokens" in name for weight in program.weights for name in weight.names) == 1
