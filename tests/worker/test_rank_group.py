"""How the ranks of a replica join a group on a device."""

from types import SimpleNamespace

import pytest
from llm_serving.worker import rank_group

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize("table", [None, "/etc/ranks.json"])
def test_a_rank_table_is_in_the_environment_when_hccl_starts(monkeypatch, table):
    environment, started = {}, []
    monkeypatch.setattr(rank_group, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(
        rank_group, "init", lambda backend: started.append((backend, environment.get("RANK_TABLE_FILE")))
    )
    rank_group.CollectiveGroup(1, 2, 8118, "Ascend", table)
    assert started == [("hccl", table)]
    assert environment["MS_NODE_ID"] == "1"
