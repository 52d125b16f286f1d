"""How PagedAttention splits the rows of a step on a device, by the shape of the batch."""

from ascend.processes import PROCESSES, STEPS, STEPS_OF_FAMILIES
from ascend.runs import NO_MASK, ROW_FOR_EACH_TOKEN, Plan

OWN_SHAPE = {
    0: Plan(rows=1, heads=4, tail=0, keys=16, key_splits=19, group=2, keys_at_once=32, key=16),
    1: Plan(rows=8, heads=3, tail=0, keys=304, key_splits=1, group=1, keys_at_once=32, key=0),
    2: Plan(rows=2, heads=8, tail=0, keys=304, key_splits=24, group=2, keys_at_once=32, key=16),
    3: Plan(rows=1, heads=4, tail=0, keys=16, key_splits=19, group=2, keys_at_once=32, key=48),
    4: Plan(rows=120, heads=8, tail=11, keys=304, key_splits=1, group=2, keys_at_once=32, key=0),
}
"""Index in `STEPS` -> the plan if a row is a request. The first row is alone, beside 7, beside a long context, beside a
prompt, and beside 130.
"""

ROW_OF_ITS_OWN = (8, 0, 1, 2, 32, 0)
"""`Plan.of_a_row` if each token is a row."""


def test_paged_attention_plan_of_a_row_depends_on_other_rows(ended):
    demo = ended("families").jobs["demo"]
    assert {index: demo.plan(index) for index in OWN_SHAPE} == OWN_SHAPE
    assert len({plan.of_a_row for plan in OWN_SHAPE.values()}) == len(OWN_SHAPE)


def test_paged_attention_plan_of_a_row_in_exact_mode_is_constant(ended):
    demo = ended("exact").jobs["demo"]
    plans = [demo.plan(index) for index in range(len(STEPS))]
    assert {plan.of_a_row for plan in plans} == {ROW_OF_ITS_OWN}
    # Keys are in one piece: the number is the longest context in whole blocks, at which a shorter row stops early.
    assert [plan.keys for plan in plans] == [304, 304, 7008, 304, 304, 16, 2016]
    assert [plan.rows for plan in plans] == [120, 120, 120, 120, 240, 120, 2040]


def test_paged_attention_reads_the_mask_rows_of_each_request(ended):
    """ATB's other kind of mask would give all requests the first rows, or, for a square mask, rows by position."""
    demo = ended("families").jobs["demo"]
    for index in (3, 5):
        rows = STEPS_OF_FAMILIES[index]
        columns = -(-max(map(sum, rows)) // 16) * 16
        expected, first = {}, 0
        for number, (tokens, _) in enumerate(rows):
            expected[number] = tokens, first * columns
            first += tokens
        assert demo.masks(index)
        for mask in demo.masks(index):
            assert mask == (ROW_FOR_EACH_TOKEN, columns, expected)


def test_paged_attention_of_single_tokens_reads_no_mask(ended):
    for name, indices in (("families", (0, 1, 2, 4)), ("exact", range(7))):
        job = ended(name).jobs["demo"]
        assert {mask.kind for index in indices for mask in job.masks(index)} == {NO_MASK}


def test_exact_products_start_each_sum_at_its_first_element(ended):
    exact, fast = ended("exact").output, ended("fast").output
    assert "enShuffleK = 0" in exact
    assert "enShuffleK = 1" not in exact
    assert "enShuffleK = 1" in fast


def test_tested_processes_run_the_steps_of_the_plans():
    assert PROCESSES["exact"].jobs[0]["steps"] == STEPS
    assert PROCESSES["families"].jobs[0]["steps"] == STEPS_OF_FAMILIES
