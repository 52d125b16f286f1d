"""Two ranks of a replica on stubs of HCCL: they find each other, exchange numbers, and load their parts of a model."""

PARTS = [[1.0, 0.0, 0.0], [2.0, 0.5, -3.0]]


def test_rank_exchange_on_ascend_returns_the_numbers_of_all_ranks(ranks):
    assert [found["exchanged"] for found in ranks] == [[[0, 0], [1, 10]]] * 2


def test_all_gather_on_ascend_is_in_the_order_of_ranks(ranks):
    assert [found["gathered"] for found in ranks] == [{"float32": PARTS, "float16": PARTS}] * 2


def test_all_reduce_on_ascend_sums_all_ranks(ranks):
    total = [[3.0, 0.5, -3.0]]
    assert [found["sums"] for found in ranks] == [{"float32": total, "float16": total}] * 2


def test_each_of_two_ascend_ranks_has_half_of_the_heads(ranks):
    assert [found["kv_heads"] for found in ranks] == [[2, 2]] * 2
