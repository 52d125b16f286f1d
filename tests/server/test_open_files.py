"""The number of connections that the limit of open files allows, beside the files of WorkAgents."""

from __future__ import annotations

import resource

import pytest
from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import ConfigError
from llm_serving.server.http.listener import FILES_OF_A_WORK_AGENT, MAX_OPEN_FILES, OpenFiles


@pytest.fixture
def limits(monkeypatch):
    """Return the soft and the hard limit, which a test can set and read."""
    limits = [0, 0]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: limits.__setitem__(slice(None), values))
    return limits


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 20_000, 20_000),
        (1024, 2**20, MAX_OPEN_FILES),
        (1024, resource.RLIM_INFINITY, MAX_OPEN_FILES),
        (2**18, 2**20, 2**18),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_soft_limit_of_open_files_is_raised(limits, soft, hard, raised):
    limits[:] = soft, hard
    OpenFiles().raise_limit(ServerConfig())
    assert limits == [raised, hard]


@pytest.mark.parametrize(("soft", "possible"), [(256, 192), (2000, 1024), (resource.RLIM_INFINITY, 1024), (10, 1)])
def test_connection_limit_leaves_files_for_the_server(limits, soft, possible):
    limits[:] = soft, soft
    assert OpenFiles().possible_connections(ServerConfig()) == possible


def test_open_files_warning_names_key_and_minimum(limits, caplog):
    limits[:] = 256, 256
    OpenFiles().possible_connections(ServerConfig())
    assert caplog.messages == [
        "the server accepts at most 192 connections, not serving_config.max_connections (1024): the process may open "
        "256 files; raise the limit to at least 1088 (LimitNOFILE of systemd; `ulimit -n`, as root beyond `ulimit -Hn`)"
    ]


@pytest.mark.parametrize("num_work_agents", [1, 64])
@pytest.mark.parametrize("num", [1, 4, 5, 8, 9, 1024, 4096, 4097, 4100, 20_000])
def test_open_files_minimum_is_exact(limits, num, num_work_agents, caplog):
    config, files = ServerConfig(max_connections=num), OpenFiles(num_work_agents)
    limits[:] = files.needed(num), files.needed(num)
    assert files.possible_connections(config) == num
    assert caplog.messages == []
    limits[0] -= 1
    assert num == 1 or files.possible_connections(config) == num - 1


@pytest.mark.parametrize("soft", [16, 63, 64])
def test_server_without_files_for_connections_does_not_start(limits, soft):
    limits[:] = soft, soft
    with pytest.raises(ConfigError) as refused:
        OpenFiles().raise_limit(ServerConfig())
    assert str(refused.value) == (
        f"the process may open {soft} files, and needs 64 for purposes other than connections: raise "
        "the limit to at least 65, and for serving_config.max_connections (1024) 1088 (LimitNOFILE of systemd; "
        "`ulimit -n`, as root beyond `ulimit -Hn`)"
    )
    limits[:] = 65, 65
    OpenFiles().raise_limit(ServerConfig())


def test_each_work_agent_leaves_fewer_files_to_connections(limits):
    limits[:] = 2048, 2048
    config = ServerConfig(max_connections=10_000)
    possible = [OpenFiles(num).possible_connections(config) for num in (1, 101)]
    assert possible[0] - possible[1] == FILES_OF_A_WORK_AGENT * 100
    limits[:] = 2048, 2048
    with pytest.raises(ConfigError, match=f"and needs {64 + FILES_OF_A_WORK_AGENT * 299} for purposes other"):
        OpenFiles(300).raise_limit(config)
