"""Client address and scheme behind trusted proxies."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from llm_serving.config import load_config
from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import ConfigError
from llm_serving.server.app import serve
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from support.connection_harness import GET, Transport, connected, settle
from support.fakes import FakeEngine

CLAIMED = "203.0.113.9"


async def tell_client(scope, receive, send):
    """Respond with the client address and scheme of the request."""
    text = f"{scope['client'][0]} {scope['scheme']}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text, "more_body": False})


def seen_client(limits, source, *claims, host="127.0.0.1"):
    """Return the client that a server sees for a request from an address of this machine, and its scheme."""

    async def ask():
        with bind(host, 0) as listener:
            server = HttpServer(tell_client, listener, limits)
            serving = asyncio.ensure_future(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0)
            headers = [*(("x-forwarded-for", claim) for claim in claims), ("x-forwarded-proto", "https")]
            transport = httpx.AsyncHTTPTransport(local_address=source)
            async with httpx.AsyncClient(transport=transport) as client:
                answer = await client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/", headers=headers)
            server.should_exit = True
            await serving
            return tuple(answer.text.split())

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("proxies", "source", "claims", "client"),
    [
        (None, "127.0.0.1", [CLAIMED], CLAIMED),
        (None, "127.0.0.2", [CLAIMED], "127.0.0.2"),
        (["127.0.0.2"], "127.0.0.2", [CLAIMED], CLAIMED),
        (["127.0.0.2"], "127.0.0.1", [CLAIMED], "127.0.0.1"),
        (["127.0.0.0/30"], "127.0.0.3", ["6.6.6.6", f"{CLAIMED}, 127.0.0.2"], CLAIMED),
        ([], "127.0.0.1", [CLAIMED], "127.0.0.1"),
        (["*"], "127.0.0.2", [CLAIMED, "198.51.100.7"], CLAIMED),
    ],
)
def test_client_address_comes_from_a_trusted_proxy(proxies, source, claims, client):
    limits = ServerConfig() if proxies is None else ServerConfig(trusted_proxies=tuple(proxies))
    believes = client == CLAIMED
    assert seen_client(limits, source, *claims) == (client, "https" if believes else "http")


def test_ipv4_mapped_proxy_address_is_trusted():
    """Such a socket has the address in IPv6 form."""
    assert seen_client(ServerConfig(), "127.0.0.1", CLAIMED, host="::") == (CLAIMED, "https")


@pytest.mark.parametrize(
    ("peer", "client"),
    [(("::ffff:192.0.2.1", 5, 0, 0), "192.0.2.1"), (("::ffff:0:1", 5, 0, 0), "::ffff:0:1"), (("2001:db8::1", 5), None)],
)
def test_forwarded_address_is_normalized(peer, client):
    async def run():
        async with connected() as (server, _, _):
            connection = server.connection()
            connection.connection_made(Transport(peername=peer))
            connection.data_received(GET % 1)
            await settle()
            assert server.app.scope["client"] == (client or peer[0], 5)
            connection.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize(
    "value", ["10.0.0", "10.0.0.1/24", "proxy.lan", "['*', 10.0.0.5]", "[10.0.0.5, 10.0.0.6/33]", "5", "[[10.0.0.5]]"]
)
def test_invalid_trusted_proxy_error_names_the_key(tmp_path, value):
    path = tmp_path / "my.yaml"
    path.write_text(f"serving_config:\n    trusted_proxies: {value}\n")
    rule = r"my\.yaml:2: `serving_config.trusted_proxies` must be a list of addresses and networks"
    with pytest.raises(ConfigError, match=rule):
        load_config(path)


@pytest.mark.parametrize(
    ("value", "proxies"),
    [
        ("10.0.0.5", ("10.0.0.5",)),
        ("[10.0.1.0/24, '2001:db8::/64']", ("10.0.1.0/24", "2001:db8::/64")),
        ("'*'", ("*",)),
    ],
)
def test_trusted_proxies_may_be_addresses_and_networks(tmp_path, value, proxies):
    path = tmp_path / "my.yaml"
    path.write_text(f"serving_config:\n    trusted_proxies: {value}\n")
    assert load_config(path).serving.trusted_proxies == proxies


@pytest.mark.parametrize("given", ["10.0.0.5", "*", ""])
def test_trusted_proxies_ignore_the_environment(monkeypatch, given):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", given)
    engine = FakeEngine()
    rule = (
        r"FORWARDED_ALLOW_IPS must not be set: the key `serving_config.trusted_proxies` lists .*, "
        r"now \[\"127.0.0.1\", \"::1\"\]"
    )
    with pytest.raises(ConfigError, match=rule):
        serve(engine)
    assert engine.num_starts == 0
