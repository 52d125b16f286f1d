"""WorkAgents are killed or made to hang while they compute every kind of stream; clients notice nothing but time.

Once in each way, and twice in a row where that is another way; `python tests/tools/kill_matrix.py` does so more often.
"""

from __future__ import annotations

import signal

import pytest
from support.kills import Table
from tools.kill_matrix import DISTANCE, model_tables
from tools.killed_servers import a_server, end_of_a_master, table_of_one, table_of_two

pytestmark = pytest.mark.end_to_end


def check(table: Table) -> None:
    assert table.all_equal, str(table)
    assert table.num_restarts == table.num_kills > 1


def test_one_work_agent_killed_or_hanging() -> None:
    check(table_of_one(num_kills=2, num_hangs=1, idle=False))


def test_two_work_agents_killed_in_turn_and_their_master_told_to_stop() -> None:
    with a_server(num_agents=2) as server:
        check(table_of_two(server, num_kills=2))
        assert "no process left" in end_of_a_master(server, signal.SIGTERM)


def test_a_work_agent_killed_in_certain_steps() -> None:
    """In chunks of prompts, in decoding, with streams in host memory; kills that follow meet the same again."""
    (table,) = model_tables({signal.SIGKILL: range(3, DISTANCE, DISTANCE)}, most_kills=4)
    check(table)
    met = {moment for _, moment in table.num_answers}
    assert {"idle", "waiting", "first chunk", "later chunk", "between steps", "decode"} <= met
