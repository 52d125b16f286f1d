"""A WorkAgent is killed at each step in turn; `python tests/tools/kill_matrix.py` prints this table and others."""

from support.fragile_harness import FragileHarness
from support.kills import LATE, MOMENTS, play, streams
from tools.kill_matrix import NEVER, simulated_table


def test_streams_are_unchanged_after_worker_kills() -> None:
    table = simulated_table()
    assert table.all_equal, str(table)
    assert table.num_restarts == table.num_kills > 300
    met = {moment for _, moment in table.num_answers}
    assert met == set(MOMENTS), "the streams do not meet every moment"


def test_requests_after_worker_kills_hit_the_prefix_cache() -> None:
    harness, asked = FragileHarness(prefix_caching=True), streams(8)
    play(harness.engine, asked, lambda: None, NEVER)
    (hit,) = asked["prefix hit"]
    assert LATE["prefix hit"] == "chunked"
    assert hit.num_cached_tokens == 40
