"""A WorkAgent is lost in each step in turn; `python tests/tools/kill_matrix.py` prints this table and others."""

from support.fragile_harness import FragileHarness
from support.kills import LATE, MOMENTS, play, streams
from tools.kill_matrix import NEVER, simulated_table


def test_every_stream_goes_on_with_the_bytes_it_would_have_had() -> None:
    table = simulated_table()
    assert table.all_equal, str(table)
    assert table.num_restarts == table.num_kills > 300
    met = {moment for _, moment in table.num_answers}
    assert met == set(MOMENTS), "the streams do not meet every moment"


def test_the_late_ones_find_what_the_early_ones_computed() -> None:
    harness, asked = FragileHarness(prefix_caching=True), streams(8)
    play(harness.engine, asked, lambda: None, NEVER)
    (hit,) = asked["prefix hit"]
    assert LATE["prefix hit"] == "chunked"
    assert hit.num_cached_tokens == 40
