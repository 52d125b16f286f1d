"""Files and batches of several API keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.batch_site import CHAT, FORM, Site, SlowForm, form_of, jsonl, line, run
from support.fakes import FakeEngine, Script
from support.server_client import error_of

KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(name)) for name in ("me", "you"))


def test_batches_are_visible_to_their_tenant_only(tmp_path):
    async def talking():
        async with Site(FakeEngine(api_keys=KEYS), tmp_path, {"x-api-key": "me"}) as site:
            batch = await site.ended(await site.begin(jsonl(line("a"))))
            paths = [f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}"]
            paths.append(f"/v1/files/{batch['input_file_id']}/content")
            theirs = {"headers": {"x-api-key": "you"}}
            seen = [(await site.client.get(path, **theirs)).status_code for path in paths]
            lists = [(await site.client.get(path, **theirs)).json()["data"] for path in ("/v1/batches", "/v1/files")]
            own = [len((await site.client.get(path)).json()["data"]) for path in ("/v1/batches", "/v1/files")]
            body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
            stolen = await site.client.post("/v1/batches", json=body, **theirs)
            return seen, lists, own, stolen, site.engine.submitted[0].tenant

    seen, lists, own, stolen, tenant = run(talking)
    assert (seen, lists, own, tenant) == ([404] * 3, [[], []], [1, 2], "me")
    assert error_of(stolen)["param"] == "input_file_id"


def test_stored_files_leave_room_for_other_tenants(tmp_path):
    engine = FakeEngine(api_keys=KEYS, limits={"batch_store_bytes": 300_000})

    async def talking():
        async with Site(engine, tmp_path) as site:

            async def keep(key, size=10_000):
                form = {"files": {"file": ("in.jsonl", b"x" * size)}, "data": {"purpose": "batch"}}
                return await site.client.post("/v1/files", headers={"x-api-key": key}, **form)

            async def fill(key):
                for number in range(30):
                    if (answer := await keep(key)).status_code != 200:
                        return number, answer
                raise AssertionError("no other tenant has room")

            return await keep("me", 160_000), await fill("me"), await fill("you"), await fill("me")

    too_long, (mine, refused), (yours, _), (more, _) = run(talking)
    assert (too_long.status_code, error_of(too_long)["param"]) == (413, "body")
    assert "must be at most 150000 bytes" in too_long.text
    assert (mine, yours, more) == (14, 7, 0)
    assert (refused.status_code, error_of(refused)["param"]) == (413, "file")
    assert "those of one API key at most as many bytes as are free" in refused.text


def test_uploads_leave_room_for_other_tenants(tmp_path):
    engine = FakeEngine(api_keys=KEYS, limits={"batch_store_bytes": 10**6})

    async def talking():
        form = SlowForm(300_000)
        async with Site(engine, tmp_path) as site:

            async def post(key, content):
                headers = FORM | {"x-api-key": key}
                return (await site.client.post("/v1/files", content=content, headers=headers)).status_code

            first = asyncio.ensure_future(post("me", form.content()))
            await form.has_begun.wait()
            content = form_of(300_000)
            others = await post("me", content), await post("you", content)
            form.may_end.set()
            return await first, *others

    assert run(talking) == (200, 429, 200)


def test_batch_of_a_removed_key_is_refused(tmp_path):
    held = FakeEngine(Script(hold_after=0), api_keys=KEYS)

    async def talking():
        async with Site(held, tmp_path, {"x-api-key": "me"}) as site:
            batch_id = await site.begin(jsonl(line("a")))
            await held.held.wait()
        other = FakeEngine(api_keys=(replace(KEYS[1], admin=True),))
        async with Site(other, tmp_path, {"x-api-key": "you"}) as site:
            batch = await site.ended(batch_id)
            return other, await site.lines(batch["error_file_id"])

    engine, errors = run(talking)
    assert [each["response"]["status_code"] for each in errors] == [401]
    assert engine.submitted == []
