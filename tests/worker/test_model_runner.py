from dataclasses import replace

import numpy as np
import pytest
from llm_serving.core.step import AllowedTokens, BlockMoveKind, StepOutput
from llm_serving.errors import ConfigError, KernelError, StepMismatchError, WorkerError
from llm_serving.kernels import library
from llm_serving.worker.model_runner import ModelRunner
from mindspore import nn
from msgspec import structs
from support.graph_model import GraphModel, backend
from support.model_factories import tiny_spec, write_model
from support.step_factories import sampling_input, step_input

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
PROMPT = np.random.default_rng(7).integers(0, 97, 21).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    return folder


@pytest.fixture
def runner(folder):
    return ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), num_blocks=16, block_size=16, max_model_len=64)


@pytest.fixture(scope="module")
def greedy_tokens(folder):
    """Return twelve tokens after `PROMPT`, each from the logits of the whole text so far."""
    model = GraphModel(SPEC, folder, backend("cpu", "bfloat16"))
    text = list(PROMPT)
    for _ in range(12):
        text.append(int(model.logits((text, 0, [1, 2, 3]))[-1].argmax()))
    return text[len(PROMPT) :]


def test_decode_steps_continue_a_prompt(runner, greedy_tokens):
    output = runner.execute(step_input([(PROMPT, 0, [8, 1, 3])]))
    assert isinstance(output, StepOutput)
    chosen = [int(output.token_ids[0])]
    for step in range(1, 12):
        length = len(PROMPT) + step
        output = runner.execute(step_input([([chosen[-1]], length - 1, [8, 1, 3])], step=step))
        assert output.step == step
        chosen.append(int(output.token_ids[0]))
    assert chosen == greedy_tokens


def test_a_step_may_refer_to_tokens_the_master_has_not_seen(runner, greedy_tokens):
    other = (PROMPT[:5], 0, [2])
    outputs = [runner.execute(step_input([other, (PROMPT, 0, [8, 1, 3])]))]
    # In step 0 the first sample belongs to the other request and the second to ours; later, the first is ours.
    for step in range(1, 12):
        token = -2 if step == 1 else -1
        outputs.append(runner.execute(step_input([([token], len(PROMPT) + step - 1, [8, 1, 3])], step=step)))
    assert [int(output.token_ids[-1]) for output in outputs] == greedy_tokens


def test_chunks_of_a_prompt_sample_nothing_until_the_last(runner, greedy_tokens):
    first = runner.execute(step_input([(PROMPT[:10], 0, [8, 1])], samples=[]))
    assert first.token_ids.shape == first.logprobs.shape == (0,)
    second = runner.execute(step_input([(PROMPT[10:], 10, [8, 1])], step=1))
    assert second.token_ids.tolist() == greedy_tokens[:1]


def test_warm_up_compiles_and_changes_no_answer(runner, greedy_tokens):
    runner.warm_up()
    assert runner.num_compilations == 3
    output = runner.execute(step_input([(PROMPT, 0, [0, 1, 3])]))
    assert output.token_ids.tolist() == greedy_tokens[:1]
    runner.execute(step_input([(PROMPT, 0, [0, 1])], step=1, scores=[(0, 3, [5], 2)], vectors=[(0, 20)]))
    assert runner.num_compilations == 3


def test_after_warm_up_steps_call_the_operator_without_mindspore(runner, greedy_tokens, monkeypatch):
    runner.warm_up()
    monkeypatch.setattr(
        nn.Cell, "__call__", lambda *given: pytest.fail("a step after warm-up must not run a graph of MindSpore")
    )
    num_calls = library.load().llm_num_calls()
    output = runner.execute(step_input([(PROMPT, 0, [0, 1, 3])]))
    assert output.token_ids.tolist() == greedy_tokens[:1]
    runner.execute(step_input([(PROMPT, 0, [0, 1])], step=1, scores=[(0, 3, [5], 2)]))
    assert library.load().llm_num_calls() - num_calls >= 2


def test_a_failure_of_the_operator_fails_the_step_with_its_reason(runner):
    runner.warm_up()
    runner._limits = replace(runner._limits, vocab_size=10**6)  # so that the operator meets the id first
    with pytest.raises(KernelError, match=r"program: .*100000"):
        runner.execute(step_input([([100000], 0, [0])]))


def test_whole_prompt_steps_use_their_own_graph_up_to_its_rows(folder, greedy_tokens):
    settings = {"num_blocks": 16, "block_size": 16, "max_model_len": 64}
    runner = ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), **settings, as_program=False, num_prompt_rows=2)
    runner.warm_up()
    graphs = 4  # hidden states of whole prompts, hidden states of any step, LM head, steps of one token per row
    assert runner.num_compilations == graphs
    prompts = [(PROMPT, 0, [0, 1, 3]), (PROMPT[:7], 0, [2]), (PROMPT, 0, [5, 6])]
    with_decode_row = [(PROMPT, 0, [7, 8]), (PROMPT[:1], 21, [0, 1, 3])]
    with library.profiling():
        for step, rows in enumerate((prompts[:2], prompts, with_decode_row)):
            assert runner.execute(step_input(rows, step=step)).token_ids[0] == greedy_tokens[0]
    calls = {time.name: time.calls for time in library.operator_times()}
    assert calls["FlashAttentionScore"] == len(SPEC.caches)
    assert calls["PagedAttention"] == 2 * len(SPEC.caches)
    assert runner.num_compilations == graphs


def test_allowed_tokens_may_follow_while_the_step_is_computed(folder):
    runner = ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), num_blocks=16, block_size=16, max_model_len=64)
    computed = []

    def allow(*words):
        computed.append(bool(library.operator_times()))
        return AllowedTokens(np.array([0, len(words)], np.int32), np.array(words, np.int32))

    step = structs.replace(step_input([(PROMPT, 0, [8, 1])]), allowed_follow=True)
    with library.profiling():
        assert runner.execute(step, lambda: allow(0, 1 << 5)).token_ids.tolist() == [37]
    assert computed == [True]
    with pytest.raises(WorkerError, match="allowed_words must have no bits beyond"):
        runner.execute(structs.replace(step, step=1), lambda: allow(*[0] * 1000))


def test_sampling_is_the_same_alone_and_in_a_batch(folder):
    def run(rows, seeds):
        runner = ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), num_blocks=16, block_size=16, max_model_len=64)
        how = sampling_input(len(rows), temperature=1.0, seed=seeds, position=len(PROMPT), num_logprobs=2)
        return runner.execute(step_input(rows, sampling=how))

    rows = [(PROMPT, 0, [2 * index, 2 * index + 1]) for index in range(6)]
    together = run(rows, range(6))
    assert len(set(together.token_ids.tolist())) > 1
    for index, row in enumerate(rows):
        reference = run([row], [index])
        assert reference.token_ids[0] == together.token_ids[index]
        assert reference.logprobs.tobytes() == together.logprobs[index : index + 1].tobytes()
        assert reference.top.of(0) == together.top.of(index)


@pytest.mark.parametrize("number", [1, -1])
def test_a_step_out_of_order_is_rejected_and_changes_nothing(runner, greedy_tokens, number):
    with pytest.raises(StepMismatchError, match=f"expected step 0. Given: {number}"):
        runner.execute(step_input([(PROMPT, 0, [8, 1])], step=number))
    assert runner.execute(step_input([(PROMPT, 0, [8, 1])])).token_ids.tolist() == greedy_tokens[:1]


def test_a_repeated_step_is_rejected(runner):
    runner.execute(step_input([(PROMPT, 0, [8, 1])]))
    with pytest.raises(StepMismatchError, match=r"expected step 1\. Given: 0"):
        runner.execute(step_input([(PROMPT, 0, [8, 1])]))


def test_a_step_after_a_failed_one_fails_only_for_rows_that_refer_to_it(runner, greedy_tokens):
    with pytest.raises(WorkerError, match="token_ids must be below 97"):
        runner.execute(step_input([([97], 0, [2])]))
    with pytest.raises(WorkerError, match="row 0 would read more of block 2 than was written"):
        runner.execute(step_input([([-1], 1, [2]), (PROMPT, 0, [8, 1])], step=1))
    with pytest.raises(WorkerError, match="refers to sample 2 of the previous step, which chose 2 tokens"):
        runner.execute(step_input([([-3], 0, [2])], step=2))
    output = runner.execute(step_input([(PROMPT, 0, [8, 1])], step=3))
    assert output.token_ids.tolist() == greedy_tokens[:1]


def test_ids_of_a_bias_are_checked_before_anything_is_computed(runner):
    how = sampling_input(1, bias={0: {97: 1.0}})
    with pytest.raises(WorkerError, match="bias_token_ids must be from 0 to 96"):
        runner.execute(step_input([(PROMPT, 0, [8, 1])], sampling=how))


def test_a_context_above_max_model_len_is_rejected(runner):
    with pytest.raises(WorkerError, match=r"at most 64 tokens\. Given: 65"):
        runner.execute(step_input([([1], 64, [1, 2, 3, 4, 5])]))


@pytest.fixture
def swapping_runner(folder):
    return ModelRunner(
        SPEC, folder, backend("cpu", "bfloat16"), num_blocks=16, block_size=16, max_model_len=64, num_swap_blocks=2
    )


def test_blocks_move_before_the_step_computes(swapping_runner, greedy_tokens):
    def run(step, rows, *moves, samples=None):
        return swapping_runner.execute(step_input(rows, step=step, moves=moves, samples=samples)).token_ids.tolist()

    first, second, third = greedy_tokens[:3]
    assert run(0, [(PROMPT, 0, [8, 1])]) == [first]
    # The request's blocks are swapped out in the same step in which they are allocated to another request.
    run(
        1,
        [(PROMPT[::-1], 0, [1, 8])],
        (BlockMoveKind.SWAP_OUT, 8, 1, 0, 0, 16),
        (BlockMoveKind.SWAP_OUT, 1, 0, 0, 0, 5),
    )
    back = (BlockMoveKind.SWAP_IN, 1, 3, 0, 0, 16), (BlockMoveKind.SWAP_IN, 0, 2, 0, 0, 5)
    assert run(2, [([first], 21, [3, 2])], *back) == [second]
    assert run(3, [([second], 22, [3, 5])], (BlockMoveKind.COPY, 2, 5, 0, 0, 6)) == [third]


def test_an_invalid_move_stops_its_step(swapping_runner, greedy_tokens):
    swapping_runner.execute(step_input([(PROMPT, 0, [8, 1])]))
    wrong = (BlockMoveKind.COPY, 0, 8), (BlockMoveKind.SWAP_OUT, 0, 2)
    with pytest.raises(WorkerError, match=r"`num_swap_blocks` = 2\. Given: 2"):
        swapping_runner.execute(step_input([(PROMPT[::-1], 0, [8, 1])], step=1, moves=wrong))
    output = swapping_runner.execute(step_input([(greedy_tokens[:1], 21, [8, 1])], step=2))
    assert output.token_ids.tolist() == greedy_tokens[1:2]


def test_an_invalid_row_stops_the_moves_of_its_step(swapping_runner, greedy_tokens):
    swapping_runner.execute(step_input([(PROMPT, 0, [8, 1])]))
    with pytest.raises(WorkerError, match="token_ids must be below 97"):
        swapping_runner.execute(step_input([([97], 0, [2])], step=1, moves=[(BlockMoveKind.COPY, 0, 8)]))
    output = swapping_runner.execute(step_input([(greedy_tokens[:1], 21, [8, 1])], step=2))
    assert output.token_ids.tolist() == greedy_tokens[1:2]


def test_a_swap_without_a_host_pool_is_rejected(runner):
    with pytest.raises(WorkerError, match=r"below `num_swap_blocks` = 0\. Given: 0"):
        runner.execute(step_input([(PROMPT, 0, [8, 1])], moves=[(BlockMoveKind.SWAP_OUT, 8, 0)]))


def test_arrays_over_read_only_memory_are_accepted(runner, greedy_tokens):
    step = step_input([(PROMPT, 0, [8, 1])])
    for array in (step.token_ids, step.query_lens, step.num_computed, step.block_tables):
        array.flags.writeable = False
    assert runner.execute(step).token_ids.tolist() == greedy_tokens[:1]


def test_more_kv_slots_than_int32_can_number_are_rejected(folder):
    with pytest.raises(ConfigError, match="`num_blocks` times `block_size` must be at most 2147483647"):
        ModelRunner(SPEC, folder, backend("cpu", "bfloat16"), num_blocks=2**28, block_size=16, max_model_len=64)
