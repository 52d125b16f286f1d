"""Which rank tables of HCCL are accepted, and which field the error names for the rejected ones."""

import json
import re

import pytest
from llm_serving.config.sections.cluster import RankDevice, read_rank_table
from llm_serving.errors import ConfigError


def devices(count, first=0):
    return [
        {"device_id": str(first + rank), "device_ip": f"192.1.27.{6 + rank}", "rank_id": str(rank)}
        for rank in range(count)
    ]


def table(count=2, **changes):
    server = {"server_id": "10.155.111.140", "device": devices(count), "host_nic_ip": "reserve"}
    return {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"} | changes


def of(*given):
    return {"server_list": [{"server_id": "10.0.0.1", "device": list(given)}]}


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "rank_table_2pcs.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_rank_table(path)

    return read


def test_ranks_are_read_in_the_order_of_their_numbers(read):
    first, second = devices(2, first=4)
    assert read(table() | of(second, first)) == [RankDevice(0, 4), RankDevice(1, 5)]
    assert read(table(version="1.2") | of({**first, "super_device_id": "0"})) == [RankDevice(0, 4)]


FIRST, SECOND = devices(2)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "must be a rank table of HCCL in JSON: Expecting"),
        ("[1]", "must be a rank table of HCCL, a JSON object. Given: [1]"),
        (table(version="2.0"), "`version` must be 1.0 or 1.2. Given: 2.0"),
        (table(status="initializing"), '`status` must be "completed". Given: initializing'),
        (
            table(server_list=[{}, {}]),
            "`server_list` must have one machine: all ranks of a replica run on it. Given: 2",
        ),
        (table(server_list=None), "`server_list` must have one machine: all ranks of a replica run on it. Given: None"),
        (table(server_count="2"), "`server_count` must be 1, the length of server_list. Given: 2"),
        (table(server_list=[{"device": 3}]), "`server_list[0].device` must be a list of devices. Given: 3"),
        (table() | of(FIRST, FIRST), "`rank_id` must be 0 to 1, each once. Given: [0, 0]"),
        (table() | of(FIRST, SECOND | {"device_id": 0}), "`device_id` must differ from rank to rank. Given: [0, 0]"),
        (
            table() | of(FIRST | {"rank_id": "-1"}),
            "`server_list[0].device[0].rank_id` must be a whole number, at least 0. Given: -1",
        ),
        (
            table() | of(FIRST, SECOND | {"device_ip": "192.1.27"}),
            "`server_list[0].device[1].device_ip` must be the IP address of the device. Given: 192.1.27",
        ),
    ],
)
def test_the_field_that_is_wrong_is_named(read, content, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        read(content)
