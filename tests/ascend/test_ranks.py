"""Two ranks of a replica on stubs of HCCL: they find each other, exchange numbers, and load their parts of a model."""

PARTS = [[1.0, 0.0, 0.0], [2.0, 0.5, -3.0]]


def test_each_rank_gets_the_numbers_of_all(ranks):
    assert [found["exchanged"] for found in ranks] == [[[0, 0], [1, 10]]] * 2


def test_gathered_parts_are_in_the_order_of_ranks(ranks):
    assert [found["gathered"] for found in ranks] == [{"float32": PARTS, "float16": PARTS}] * 2


def test_sums(ranks):
    total = [[3.0, 0.5, -3.0]]
    assert [found["sums"] for found in ranks] == [{"float32": total, "float16": total}] * 2


def test_each_rank_has_half_of_the_heads(ranks):
    assert [found["kv_heads"] for found in ranks] == [[2, 2]] * 2
