"""WorkAgents are killed or stopped while they compute streams of every kind; clients only see a delay.

Each kind of kill is tested once, and twice in a row if that differs; `python tests/tools/kill_matrix.py` does more.
"""

from __future__ import annotations

import signal

import psutil
import pytest
from support.agent_forks import end_forks
from support.kills import Table
from tools.kill_matrix import DISTANCE, model_tables
from tools.killed_servers import a_server, end_of_a_master, table_of_one, table_of_two

pytestmark = pytest.mark.end_to_end


def check(table: Table) -> None:
    assert table.all_equal, str(table)
    assert table.num_restarts == table.num_kills > 1


def test_streams_survive_a_killed_or_hanging_work_agent() -> None:
    check(table_of_one(num_kills=2, num_hangs=1, idle=False))


def test_streams_survive_two_killed_work_agents_until_the_master_stops() -> None:
    with a_server(num_agents=2) as server:
        check(table_of_two(server, num_kills=2))
        assert "no process left" in end_of_a_master(server, signal.SIGTERM)


def test_streams_survive_a_work_agent_killed_in_given_steps() -> None:
    """The steps are in chunks of prompts, in decoding, and with swapped streams; later kills would meet the same
    states.
    """
    (table,) = model_tables({signal.SIGKILL: range(3, DISTANCE, DISTANCE)}, most_kills=4)
    check(table)
    met = {moment for _, moment in table.num_answers}
    assert {"idle", "waiting", "first chunk", "later chunk", "between steps", "decode"} <= met
    end_forks()
    assert not [each for each in psutil.Process().children() if "support.agent_forks" in each.cmdline()]
