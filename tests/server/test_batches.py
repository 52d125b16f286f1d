"""Files and batches: what is kept is answered once, whatever ends in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import replace
from functools import partial

import httpx
import pytest
from fakes import FakeEngine, Script
from llm_serving.config.sections.api_key import ApiKey
from llm_serving.errors import (
    CapacityError,
    ConfigError,
    RequestTooLargeError,
    StoreFullError,
    UnavailableError,
    WorkerDiedError,
)
from llm_serving.server.app import build_site, open_batches, run_file
from llm_serving.server.authentication import hash_key
from llm_serving.server.batches import BatchStore, Shares
from llm_serving.server.batches import batches as module
from llm_serving.server.batches.batches import Answered
from llm_serving.server.batches.objects import Batch
from llm_serving.server.batches.store import new_id
from llm_serving.server.http_server import HttpServer
from llm_serving.server.listener import bind
from server_client import error_of, request

CHAT = "/v1/chat/completions"


def line(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hello", **body}}


def jsonl(*lines):
    return "\n".join(json.dumps(each) for each in lines).encode()


class Site:
    """A client of an engine whose batches are kept in a folder."""

    def __init__(self, engine, folder, headers=None):
        self.engine = engine
        serving = replace(engine.config.serving, batch_path=folder / "batches.db")
        engine.config = replace(engine.config, serving=serving)
        self._site = build_site(engine)
        self.outside = self._site.outside
        transport = httpx.ASGITransport(self.outside)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    async def __aenter__(self):
        self.batches = self._site.routes.batches = open_batches(self.engine, self._site.inside)
        await self.batches.start()
        return self

    async def __aexit__(self, *_):
        await self.batches.stop()
        await self.client.aclose()

    async def upload(self, content):
        form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
        return (await self.client.post("/v1/files", **form)).json()["id"]

    async def begin(self, content, endpoint="/v1/completions", **fields):
        file_id = await self.upload(content)
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
        answer = await self.client.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def show(self, batch_id):
        return (await self.client.get(f"/v1/batches/{batch_id}")).json()

    async def ended(self, batch_id):
        await asyncio.wait([self.batches.task(batch_id)])
        return await self.show(batch_id)

    async def lines(self, file_id):
        text = (await self.client.get(f"/v1/files/{file_id}/content")).text
        return [json.loads(each) for each in text.splitlines()]


FORM = {"content-type": "multipart/form-data; boundary=b"}
FORM_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
FORM_TAIL = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'


def form_of(num_bytes):
    return FORM_HEAD + b"x" * num_bytes + FORM_TAIL


class SlowForm:
    """A form whose file has come, and whose end comes when it may."""

    def __init__(self, num_bytes):
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self._num_bytes = num_bytes

    async def content(self):
        yield FORM_HEAD + b"x" * self._num_bytes
        self.has_begun.set()
        await self.may_end.wait()
        yield FORM_TAIL


def run(talking):
    return asyncio.run(talking())


def test_lines_are_answered_in_their_order_in_the_least_class(tmp_path):
    engine = FakeEngine()

    async def talking():
        async with Site(engine, tmp_path) as site:
            lines = jsonl(line("a"), line("b", temperature=-1), line("c", priority=0))
            batch = await site.ended(await site.begin(lines, metadata={"of": "mine"}))
            return batch, await site.lines(batch["output_file_id"]), await site.lines(batch["error_file_id"])

    batch, answers, errors = run(talking)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["metadata"] == {"of": "mine"}
    assert [(each["custom_id"], each["response"]["status_code"]) for each in answers] == [("a", 200), ("c", 200)]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == "Hello world"
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("b", 400)]
    assert "temperature" in errors[0]["response"]["body"]["error"]["message"]
    assert sorted(each.priority for each in engine.submitted) == [0, 1]


def test_what_was_ignored_of_a_line_is_named_in_its_answer(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            lines = jsonl(line("a", store=True, service_tier="flex"), line("b"), line("c", store=True, temperature=-1))
            batch = await site.ended(await site.begin(lines))
            return await site.lines(batch["output_file_id"]), await site.lines(batch["error_file_id"])

    (first, second), (refused,) = run(talking)
    assert first["response"]["ignored_parameters"] == "store, service_tier"
    assert "ignored_parameters" not in second["response"]
    assert "ignored_parameters" not in refused["response"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "the file has no lines"),
        (b"{", "is not a request"),
        (jsonl(line("a", url="/v1/models")), "`url` must be /v1/completions"),
        (jsonl(line("a"), line("a")), "`custom_id` must be"),
        (jsonl(line("a", stream=True)), "neither for a stream"),
        (jsonl(line("a") | {"priority": 1}), "unknown field `priority`"),
        (jsonl({"custom_id": "a", "url": "/v1/completions", "body": []}), "`body` must be an object"),
        (
            b'{"custom_id": "a", "custom_id": "b", "url": "/v1/completions", "body": {}}',
            "`custom_id` must be given once",
        ),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"n": 1, "n": 2}}', "`n` must be given once"),
    ],
)
def test_a_file_with_a_fault_is_answered_by_what_it_is(tmp_path, text, fault):
    engine = FakeEngine()

    async def talking():
        async with Site(engine, tmp_path) as site:
            return await site.ended(await site.begin(text))

    batch = run(talking)
    assert batch["status"] == "failed"
    assert fault in batch["errors"]["data"][-1]["message"]
    assert engine.submitted == []


def test_lines_out_of_pieces_of_any_size():
    lines = jsonl(line("a"), line("b")) + b"\n\n"
    for size in (1, 7, len(lines)):
        pieces = [lines[i : i + size] for i in range(0, len(lines), size)]
        assert [number for number, _ in module._lines_of(pieces)] == [1, 2]
        assert module.check_lines(pieces, "/v1/completions") == []


def test_lines_and_their_number_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_LINES", 3)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    assert module.check_lines([jsonl(*map(line, "abcd"))], "/v1/completions")[-1].line == 4
    assert module.check_lines([b"x" * 150] * 9, "/v1/completions")[-1].code == "too_long"


def test_an_end_of_the_process_loses_no_line_and_answers_none_twice(tmp_path):
    first, second = FakeEngine(Script(hold_after=0)), FakeEngine()
    first.script_for = lambda submitted: Script() if len(first.submitted) < 3 else Script(hold_after=0)

    async def talking():
        async with Site(first, tmp_path) as site:
            batch_id = await site.begin(jsonl(*map(line, "abcde")))
            await first.held.wait()
            while (await site.show(batch_id))["request_counts"]["completed"] < 2:
                await asyncio.sleep(0)
        async with Site(second, tmp_path) as site:
            batch = await site.ended(batch_id)
            return batch, await site.lines(batch["output_file_id"])

    batch, answers = run(talking)
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert [each["custom_id"] for each in answers] == list("abcde")
    assert len(second.submitted) == 3


def test_a_batch_that_is_cancelled_keeps_what_was_answered(tmp_path, caplog):
    engine = FakeEngine()
    engine.script_for = lambda submitted: Script() if len(engine.submitted) < 2 else Script(hold_after=0)

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch_id = await site.begin(jsonl(*map(line, "abc")))
            await engine.held.wait()
            while (await site.show(batch_id))["request_counts"]["completed"] < 1:
                await asyncio.sleep(0)
            cancelling = (await site.client.post(f"/v1/batches/{batch_id}/cancel")).json()
            batch = await site.ended(batch_id)
            again = (await site.client.post(f"/v1/batches/{batch_id}/cancel")).json()
            files = [await site.lines(batch[name]) for name in ("output_file_id", "error_file_id")]
            return cancelling, batch, again, files

    cancelling, batch, again, (answers, errors) = run(talking)
    assert (cancelling["status"], batch["status"], again["status"]) == ("cancelling", "cancelled", "cancelled")
    assert [each["custom_id"] for each in answers] == ["a"]
    assert [each["error"]["code"] for each in errors] == ["batch_cancelled"] * 2
    assert len(engine.aborted) == 2
    assert "status 500" not in caplog.text


def test_a_batch_that_ends_while_it_is_cancelled_has_ended(tmp_path):
    engine = FakeEngine(Script(hold_after=0))

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch_id = await site.begin(jsonl(line("a")))
            await engine.held.wait()
            batch, stored = await site.batches.stored(BatchStore.batch, batch_id, None), site.batches.stored

            async def once_it_has_ended(*arguments):
                if asyncio.current_task() is cancelling:
                    await asyncio.wait([site.batches.task(batch_id)])
                return await stored(*arguments)

            site.batches.stored = once_it_has_ended
            cancelling = asyncio.create_task(site.batches.cancel(batch.id))
            await asyncio.sleep(0)
            engine.gate.set()
            told = await cancelling
            return told.status, (await site.show(batch_id))["status"]

    assert run(talking) == ("completed", "completed")


def test_inputs_of_batches_that_wait_take_no_more_of_the_disk_than_files_may(tmp_path):
    def begin(name):
        new = Batch(id=name, endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=9)
        store.add_batch(new, "", 0.0)
        return new

    with contextlib.closing(BatchStore(tmp_path / "batches.db", Shares(10**5))) as store:
        store.add_file(module.new_file("f", "in.jsonl", "batch", 0.0), "", [b"x" * 40_000], 0.0)
        first, _ = begin("a"), begin("b")
        with pytest.raises(StoreFullError, match="batch_store_bytes"):
            begin("c")
        first.status = "failed"
        store.save(first)
        begin("d")


def test_files_without_content_take_room_as_well(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "batches.db", Shares(10**4))) as store:
        with pytest.raises(RequestTooLargeError):
            for number in range(100):
                store.add_file(module.new_file(f"f{number}", "n" * 200, "batch", 0.0), "", [b"x"], 0.0)
        assert len(store.files(None, None, 100, None)) > 10
        with pytest.raises(StoreFullError, match="batch_store_bytes"):
            for number in range(100):
                new = Batch(id=f"b{number}", endpoint="/", input_file_id="f0", created_at=0, expires_at=9)
                store.add_batch(new, "", 0.0)
                new.status = "failed"
                store.save(new)


def test_lines_wait_until_there_is_room_for_their_answers(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "LEAST_PAUSE_S", 0.0)
    answer, asked = b'"' + b"x" * 10_000 + b'"', []

    async def ask(url, body, tenant):
        del url, body, tenant
        asked.append(1)
        return Answered(200, answer)

    async def talking():
        engine = FakeEngine(limits={"batch_store_bytes": 100_000, "batch_concurrency": 2})
        async with Site(engine, tmp_path) as site:
            site.batches._ask = ask
            other = await site.upload(b"x" * 50_000)
            batch_id = await site.begin(jsonl(*(line(str(n)) for n in range(9))))
            while "wait: files and batches have at most 100000 bytes" not in caplog.text:
                await asyncio.sleep(0)
            num_asked, counts = len(asked), (await site.show(batch_id))["request_counts"]
            await site.client.delete(f"/v1/files/{other}")
            batch = await site.ended(batch_id)
            kept = await site.client.get(f"/v1/files/{batch['output_file_id']}")
            return num_asked, counts, batch, kept.json()["bytes"]

    num_asked, counts, batch, size = run(talking)
    assert num_asked in (5, 6)  # one more may be under way beside the one that is too much
    assert (counts["total"], batch["request_counts"]["completed"]) == (9, 9)
    assert 90_000 < size < 100_000


def test_what_is_kept_beside_a_batch_is_bounded(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            fields = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"x": "y" * 513}}
            body = {"input_file_id": await site.upload(jsonl(line("a"))), **fields}
            return await site.client.post("/v1/batches", json=body)

    assert error_of(run(talking))["param"] == "metadata"


def test_a_batch_that_is_cancelled_before_its_input_is_looked_at_stays_so(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "batches.db", Shares(2**20))) as store:
        new = Batch(id="b", endpoint="/v1/completions", input_file_id="f", created_at=0, expires_at=9)
        store.add_batch(new, "", 0.0)
        assert store.cancel("b", 1.0).status == "cancelling"
        begun = module._begin(store, "b", 2.0)
        assert (begun.status, begun.cancelling_at, begun.errors) == ("cancelling", 1, None)
        assert store.batch("b", None).status == "cancelling"


def test_a_batch_that_stands_still_can_be_cancelled(tmp_path):
    async def fail(*_):
        raise ValueError("a fault of ours")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches._ask = fail
            batch_id = await site.begin(jsonl(line("a")))
            still = await site.ended(batch_id)
            cancelling = (await site.client.post(f"/v1/batches/{batch_id}/cancel")).json()
            return still["status"], cancelling["status"], (await site.ended(batch_id))["status"]

    assert run(talking) == ("in_progress", "cancelling", "cancelled")


def test_a_batch_that_waits_for_its_store_is_cancelled_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_STORE_PAUSE_S", 3600.0)

    async def fail(*_):
        raise UnavailableError("the disk is full")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches._ask = fail
            batch_id = await site.begin(jsonl(line("a")))
            while site.batches.trouble is None:
                await asyncio.sleep(0)
            await site.client.post(f"/v1/batches/{batch_id}/cancel")
            return (await asyncio.wait_for(site.ended(batch_id), 60.0))["status"]

    assert run(talking) == "cancelled"


def test_a_batch_that_is_not_done_in_time_expires(tmp_path, monkeypatch):
    monkeypatch.setattr("llm_serving.server.routes.batches.WINDOW_S", 0)
    engine = FakeEngine(Script(hold_after=0))

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch = await site.ended(await site.begin(jsonl(line("a"))))
            return batch, await site.lines(batch["error_file_id"])

    batch, errors = run(talking)
    assert batch["status"] == "expired"
    assert errors[0]["error"]["code"] == "batch_expired"


def test_a_line_waits_while_there_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_PAUSE_S", 0.0)
    engine = FakeEngine(refusal=CapacityError("the queue is full", 0.0))
    asked, check = [], engine.generate

    def generate(*arguments, **named):
        asked.append(1)
        if len(asked) == 3:
            engine.refusal = None
        return check(*arguments, **named)

    engine.generate = generate

    async def talking():
        async with Site(engine, tmp_path) as site:
            site.batches._ask = _without_waiting(site.batches._ask)
            return await site.ended(await site.begin(jsonl(line("a"))))

    assert run(talking)["request_counts"]["completed"] == 1
    assert len(asked) == 3


def test_nothing_is_asked_of_an_engine_that_loads(tmp_path, monkeypatch):
    engine = FakeEngine(ready=False)

    async def look(seconds):
        assert engine.submitted == []
        engine.ready = True

    monkeypatch.setattr("llm_serving.server.inside.asyncio.sleep", look)
    ask = build_site(engine).inside
    assert asyncio.run(ask("/v1/completions", b'{"prompt": "hello"}', "")).status == 200


def _without_waiting(ask):
    async def asks(*arguments):
        return replace(await ask(*arguments), retry_after_s=None)

    return asks


class TestTenants:
    KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(name)) for name in ("me", "you"))

    def engine(self, keys=KEYS):
        return FakeEngine(api_keys=keys)

    def test_another_tenant_sees_and_ends_nothing(self, tmp_path):
        async def talking():
            async with Site(self.engine(), tmp_path, {"x-api-key": "me"}) as site:
                batch = await site.ended(await site.begin(jsonl(line("a"))))
                paths = [f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}"]
                paths.append(f"/v1/files/{batch['input_file_id']}/content")
                theirs = {"headers": {"x-api-key": "you"}}
                seen = [(await site.client.get(path, **theirs)).status_code for path in paths]
                lists = [
                    (await site.client.get(path, **theirs)).json()["data"] for path in ("/v1/batches", "/v1/files")
                ]
                own = [len((await site.client.get(path)).json()["data"]) for path in ("/v1/batches", "/v1/files")]
                body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
                stolen = await site.client.post("/v1/batches", json=body, **theirs)
                return seen, lists, own, stolen, site.engine.submitted[0].tenant

        seen, lists, own, stolen, tenant = run(talking)
        assert (seen, lists, own, tenant) == ([404] * 3, [[], []], [1, 2], "me")
        assert error_of(stolen)["param"] == "input_file_id"

    def test_one_tenant_leaves_room_to_another(self, tmp_path):
        engine = FakeEngine(api_keys=self.KEYS, limits={"batch_store_bytes": 300_000})

        async def talking():
            async with Site(engine, tmp_path) as site:

                async def keep(key, size=10_000):
                    form = {"files": {"file": ("in.jsonl", b"x" * size)}, "data": {"purpose": "batch"}}
                    return await site.client.post("/v1/files", headers={"x-api-key": key}, **form)

                async def fill(key):
                    for number in range(30):
                        if (answer := await keep(key)).status_code != 200:
                            return number, answer
                    raise AssertionError("nobody else has any room")

                return await keep("me", 160_000), await fill("me"), await fill("you"), await fill("me")

        too_long, (mine, refused), (yours, _), (more, _) = run(talking)
        assert (too_long.status_code, error_of(too_long)["param"]) == (413, "body")
        assert "must be at most 150000 bytes" in too_long.text
        assert (mine, yours, more) == (14, 7, 0)
        assert (refused.status_code, error_of(refused)["param"]) == (413, "file")
        assert "those of one API key at most as many as they leave free" in refused.text

    def test_one_tenant_leaves_room_to_files_of_another_that_are_on_their_way(self, tmp_path):
        engine = FakeEngine(api_keys=self.KEYS, limits={"batch_store_bytes": 10**6})

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

    def test_a_tenant_whose_key_is_gone_is_answered_no_more(self, tmp_path):
        held = FakeEngine(Script(hold_after=0), api_keys=self.KEYS)

        async def talking():
            async with Site(held, tmp_path, {"x-api-key": "me"}) as site:
                batch_id = await site.begin(jsonl(line("a")))
                await held.held.wait()
            other = FakeEngine(api_keys=(replace(self.KEYS[1], admin=True),))
            async with Site(other, tmp_path, {"x-api-key": "you"}) as site:
                batch = await site.ended(batch_id)
                return other, await site.lines(batch["error_file_id"])

        engine, errors = run(talking)
        assert [each["response"]["status_code"] for each in errors] == [401]
        assert engine.submitted == []


def test_files_are_listed_shown_and_deleted(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            ids = [await site.upload(jsonl(line(name))) for name in "abc"]
            listed = (await site.client.get("/v1/files", params={"limit": 2, "purpose": "batch"})).json()
            rest = (await site.client.get("/v1/files", params={"after": listed["last_id"]})).json()
            shown = (await site.client.get(f"/v1/files/{ids[0]}")).json()
            await site.client.delete(f"/v1/files/{ids[0]}")
            gone = await site.client.get(f"/v1/files/{ids[0]}")
            return ids, listed, rest, shown, gone

    ids, listed, rest, shown, gone = run(talking)
    assert [each["id"] for each in listed["data"]] == ids[:0:-1]
    assert (listed["has_more"], [each["id"] for each in rest["data"]]) == (True, ids[:1])
    assert (shown["bytes"], shown["filename"], shown["purpose"]) == (len(jsonl(line("a"))), "in.jsonl", "batch")
    assert gone.status_code == 404


@pytest.mark.parametrize(
    ("query", "param", "status"),
    [("after=x", "after", 404), ("limit=0", "limit", 400), ("limit=%D9%A3", "limit", 400), ("after=", None, 200)],
)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_pages_that_there_are_not_are_refused(tmp_path, path, query, param, status):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            return await site.client.get(f"{path}?{query}")

    answer = run(talking)
    assert answer.status_code == status
    assert param is None or error_of(answer)["param"] == param


def test_a_clock_that_stands_still_leaves_no_file_or_batch_out_of_a_list(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches.now = lambda: 1_000_000.0
            files = [await site.upload(jsonl(line(name))) for name in "abc"]
            batches = [await site.begin(jsonl(line(name))) for name in "abc"]
            listed = []
            for path in ("/v1/files?purpose=batch&", "/v1/batches?"):
                seen, after = [], ""
                while page := (await site.client.get(f"{path}limit=1{after}")).json()["data"]:
                    seen += [each["id"] for each in page]
                    after = f"&after={seen[-1]}"
                listed.append(seen)
            return files, batches, listed

    files, batches, (listed_files, listed_batches) = run(talking)
    assert listed_batches == batches[::-1]
    assert listed_files[3:] == files[::-1]
    assert len(listed_files) == 6


def test_a_file_says_how_long_it_is_and_how_long_it_stays(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            about = (await site.client.post("/v1/files", files={"file": ("in", b"x" * 10)}, data=form)).json()
            content = await site.client.get(f"/v1/files/{about['id']}/content")
            await site.batches.stored(BatchStore.expire, about["created_at"] + 3601, 10**9)
            gone = await site.client.get(f"/v1/files/{about['id']}")
            return about, content, gone

    about, content, gone = run(talking)
    assert about["expires_at"] == about["created_at"] + 3600
    assert (content.headers["content-length"], content.content) == ("10", b"x" * 10)
    assert gone.status_code == 404


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("x", b"x")}, "data": {"purpose": "batch", "expires_at": "3"}}, "expires_at"),
        (
            {"files": {"file": ("x", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "3600"}},
            "expires_after[anchor]",
        ),
        *(
            (
                {
                    "files": {"file": ("x", b"x")},
                    "data": {
                        "purpose": "batch",
                        "expires_after[anchor]": "created_at",
                        "expires_after[seconds]": seconds,
                    },
                },
                "expires_after[seconds]",
            )
            for seconds in ("3599", "2592001", "-3600", "1e4", "٣٦٠٠", "9" * 40)
        ),
        ({"files": {"file": ("x", b"x")}}, "purpose"),
        ({"files": {"file": ("x", b"x")}, "data": {"purpose": ["fine-tune", "batch"]}}, "purpose"),
        ({"files": {"file": ("x", b"x")}, "data": {"purpose": "batch", "file": "x"}}, "file"),
        ({"files": {"file": ("x", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "body"),
        ({"files": {"file": ("x", b"x" * 3_000_000)}, "data": {"purpose": "batch"}}, "body"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, form, param):
    async def talking():
        async with Site(FakeEngine(limits={"batch_store_bytes": 2**20}), tmp_path) as site:
            answer = await site.client.post("/v1/files", **form)
            assert (await site.client.get("/v1/files")).json()["data"] == []
            return answer

    answer = run(talking)
    assert error_of(answer)["param"] == param


def test_all_files_together_have_a_bound(tmp_path):
    async def talking():
        async with Site(FakeEngine(limits={"batch_store_bytes": 2**20}), tmp_path) as site:
            content = b"x" * 600_000
            await site.upload(content)
            form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
            refused = await site.client.post("/v1/files", **form)
            return refused, len((await site.client.get("/v1/files")).json()["data"])

    refused, count = run(talking)
    assert (refused.status_code, error_of(refused)["param"], count) == (413, "file", 1)


def test_a_file_may_be_longer_than_what_all_connections_may_hold(tmp_path):
    async def talking():
        async with Site(FakeEngine(limits={"max_buffered_bytes": 2**21}), tmp_path) as site:
            with bind("127.0.0.1", 0) as listener:
                server = HttpServer(site.outside, listener, site.engine.config.serving)
                serving = asyncio.ensure_future(server.serve([listener]))
                while not server.started:
                    await asyncio.sleep(0)
                url = "http://{}:{}".format(*listener.getsockname())
                form = {"files": {"file": ("in.jsonl", b"x" * 2**22)}, "data": {"purpose": "batch"}}
                async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
                    answer = await client.post("/v1/files", **form)
                server.should_exit = True
                await serving
                return answer

    answer = run(talking)
    assert (answer.status_code, answer.json()["bytes"]) == (200, 2**22)


def test_files_on_their_way_have_the_bound_of_those_kept(tmp_path):
    async def talking():
        form = SlowForm(700_000)
        async with Site(FakeEngine(limits={"batch_store_bytes": 2**20}), tmp_path) as site:
            first = asyncio.ensure_future(site.client.post("/v1/files", content=form.content(), headers=FORM))
            await form.has_begun.wait()
            second = await site.client.post("/v1/files", content=form_of(700_000), headers=FORM)
            form.may_end.set()
            await first
            third = await site.client.post("/v1/files", content=form_of(200_000), headers=FORM)
            return first.result(), second, third

    answers = run(talking)
    assert [each.status_code for each in answers] == [200, 429, 200]
    assert "retry-after" in answers[1].headers


def test_what_is_old_is_forgotten(tmp_path):
    with contextlib.closing(BatchStore(tmp_path / "x.db", Shares(2**20))) as store:
        store.add_file(module.new_file("file_a", "x", "batch", 100.0), "", [b"x"], 100.0)
        store.expire(100.0 + module.KEPT_S, module.KEPT_S)
        assert len(store.files(None, None, 9, None)) == 1
        store.expire(102.0 + module.KEPT_S, module.KEPT_S)
        assert store.files(None, None, 9, None) == []


def test_without_a_place_to_keep_them_there_are_none():
    answer = request(FakeEngine(), "GET", "/v1/batches")
    assert answer.status_code == 404
    assert "serving_config.batch_path" in error_of(answer)["message"]


def test_a_place_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"serving_config\.batch_path"):
        BatchStore(tmp_path, Shares(1))


class TestFiles:
    def run(self, engine, folder, seen=None):
        told = [] if seen is None else seen
        return asyncio.run(run_file(engine, folder / "in.jsonl", folder / "out.jsonl", told.append))

    def lines(self, path):
        return [json.loads(each) for each in path.read_text().splitlines()]

    def test_a_file_is_answered_into_another(self, tmp_path):
        (tmp_path / "in.jsonl").write_bytes(jsonl(line("a"), line("b", top_p=7), line("c")))
        seen = []
        counts = self.run(FakeEngine(), tmp_path, seen)
        assert (counts.completed, counts.failed, seen[-1]) == (2, 1, counts)
        assert [each["custom_id"] for each in self.lines(tmp_path / "out.jsonl")] == ["a", "c"]
        assert [each["custom_id"] for each in self.lines(tmp_path / "out.jsonl.errors")] == ["b"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.errors"]

    def test_a_run_that_ended_early_goes_on(self, tmp_path):
        (tmp_path / "in.jsonl").write_bytes(jsonl(*map(line, "abc")))
        first, second = FakeEngine(), FakeEngine()
        first.script_for = lambda submitted: Script() if len(first.submitted) < 2 else Script(hold_after=0)

        def leave(counts):
            if counts.completed:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run_file(first, tmp_path / "in.jsonl", tmp_path / "out.jsonl", leave))
        assert not (tmp_path / "out.jsonl").exists()
        assert self.run(second, tmp_path).completed == 3
        assert len(second.submitted) == 2
        assert [each["custom_id"] for each in self.lines(tmp_path / "out.jsonl")] == list("abc")

    def test_another_input_is_not_taken_for_the_same(self, tmp_path):
        (tmp_path / "in.jsonl").write_bytes(jsonl(line("a")))
        with pytest.raises(WorkerDiedError):
            self.run(FakeEngine(Script(hold_after=0), failure=WorkerDiedError("gone")), tmp_path)
        (tmp_path / "in.jsonl").write_bytes(jsonl(line("b")))
        with pytest.raises(ConfigError, match="another input"):
            self.run(FakeEngine(), tmp_path)

    def test_a_fault_is_told_and_can_be_mended(self, tmp_path):
        once = {"batch_store_bytes": 2 * len(jsonl(line("a"), line("a"))) - 1}
        (tmp_path / "in.jsonl").write_bytes(jsonl(line("a"), line("a")))
        with pytest.raises(ConfigError, match=r"in\.jsonl:2: `custom_id` must be"):
            self.run(FakeEngine(limits=once), tmp_path)
        (tmp_path / "in.jsonl").write_bytes(jsonl(line("a"), line("b")))
        assert self.run(FakeEngine(limits=once), tmp_path).completed == 2

    def test_a_full_disk_ends_a_run_that_can_go_on_later(self, tmp_path, monkeypatch):
        (tmp_path / "in.jsonl").write_bytes(jsonl(*map(line, "ab")))

        def full(store, batch_id, number, *answer):
            if number == 1:
                raise sqlite3.OperationalError("database or disk is full")
            return answer_line(store, batch_id, number, *answer)

        answer_line = BatchStore.answer
        monkeypatch.setattr(BatchStore, "answer", full)
        with pytest.raises(UnavailableError, match="cannot be kept now: database or disk is full"):
            self.run(FakeEngine(), tmp_path)
        monkeypatch.undo()
        again = FakeEngine()
        assert (self.run(again, tmp_path).completed, len(again.submitted)) == (2, 1)

    def test_a_place_for_answers_that_cannot_be_written_is_named(self, tmp_path):
        (tmp_path / "in.jsonl").write_bytes(jsonl(line("a")))
        (tmp_path / "out.jsonl").mkdir()
        with pytest.raises(ConfigError, match=r"out\.jsonl cannot be written: .* what was answered is kept"):
            self.run(FakeEngine(), tmp_path)


def test_a_database_is_one_process_s_at_a_time(tmp_path):
    path = tmp_path / "x.db"
    with (
        contextlib.closing(BatchStore(path, Shares(2**20))),
        pytest.raises(ConfigError, match="used by another process"),
    ):
        BatchStore(path, Shares(2**20))
    BatchStore(path, Shares(2**20)).close()


def test_what_could_not_be_kept_takes_no_room_of_the_disk(tmp_path):
    def pieces():
        yield from [b"x" * 2**18] * 30
        raise sqlite3.OperationalError("database or disk is full")

    path = tmp_path / "x.db"
    with contextlib.closing(BatchStore(path, Shares(2**30))) as store:
        with pytest.raises(sqlite3.OperationalError):
            store.add_file(module.new_file("file_a", "x", "batch", 100.0), "", pieces(), 100.0)
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) > 2**22
        store.give_back()
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 2**18
        assert store.files(None, None, 9, None) == []


def _fill(store, num_pages=0):
    """As if the disk had so many pages more than are used; all it wants with a negative number."""
    used = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {used + num_pages if num_pages >= 0 else 2**30}")


def test_a_batch_goes_on_when_a_full_disk_has_room_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_STORE_PAUSE_S", 0.0)
    answered_when_full = []

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            room, ask = asyncio.Event(), site.batches._ask

            async def ask_later(*arguments):
                await room.wait()
                return await ask(*arguments)

            site.batches._ask = ask_later
            batch_id = await site.begin(jsonl(*(line(str(n)) for n in range(40))))  # whose answers need new pages
            while (await site.show(batch_id))["status"] != "in_progress":
                await asyncio.sleep(0)
            await site.batches.stored(_fill)
            form = {"files": {"file": ("in.jsonl", b"x" * 9000)}, "data": {"purpose": "batch"}}
            refused = await site.client.post("/v1/files", **form)
            room.set()
            while site.batches.trouble is None:
                await asyncio.sleep(0)
            answered_when_full.append((await site.show(batch_id))["request_counts"]["completed"])
            await site.batches.stored(_fill, -1)
            batch = await site.ended(batch_id)
            return refused, batch, await site.lines(batch["output_file_id"])

    refused, batch, answers = run(talking)
    assert refused.status_code == 503
    assert error_of(refused)["message"] == "files and batches cannot be kept now: database or disk is full"
    assert answered_when_full[0] < 40
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert [each["custom_id"] for each in answers] == [str(n) for n in range(40)]


def test_a_line_that_must_come_again_holds_no_place_of_others(tmp_path):
    async def ask(url, body, tenant):
        del url, body
        return Answered(429 if tenant == "refused" else 200, b"{}", 3600.0)

    async def begin(batches, tenant):
        about = module.new_file(new_id("file"), "in.jsonl", "batch", batches.now())
        await batches.stored(BatchStore.add_file, about, tenant, [jsonl(line("a"), line("b"))], batches.now())
        created = int(batches.now())
        batch = Batch(
            id=new_id("batch"), endpoint="/v1/completions", input_file_id=about.id, created_at=created,
            expires_at=created + 3600,
        )  # fmt: skip
        await batches.create(batch, tenant)
        return batch.id

    async def talking():
        shares = Shares(2**20)
        store = partial(BatchStore, tmp_path / "batches.db", shares)
        batches = module.Batches(store, ask, concurrency=1, priority_class="least", shares=shares)
        await begin(batches, "refused")
        other = await begin(batches, "other")
        async with asyncio.timeout(60):
            await asyncio.wait([batches.task(other)])
        status = (await batches.stored(BatchStore.batch, other, None)).status
        await batches.stop()
        return status

    assert run(talking) == "completed"


def test_one_line_as_deep_as_can_be_read_does_not_stop_the_batch(tmp_path):
    def deep(depth):
        return b'{"custom_id": "deep", "url": "/v1/completions", "body": {"prompt": %s%s}}' % (
            b"[" * depth,
            b"]" * depth,
        )

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:

            def is_read(_, depth):
                return not module.check_lines([deep(depth)], "/v1/completions")

            deepest, most = 1, 2000  # as the thread of the store reads it
            while most - deepest > 1:
                depth = (deepest + most) // 2
                deepest, most = (depth, most) if await site.batches.stored(is_read, depth) else (deepest, depth)
            batch_id = await site.begin(jsonl(line("a")) + b"\n" + deep(deepest) + b"\n" + jsonl(line("b")))
            return await site.ended(batch_id)

    batch = run(talking)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})


def test_numbers_of_a_line_are_asked_for_as_they_are_written(tmp_path):
    bodies = []

    async def ask(url, body, tenant):
        del url, tenant
        bodies.append(body)
        return Answered(200, b"{}")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches._ask = ask
            text = (
                b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "top_p": 0.50, "priority":null}}'
            )
            await site.ended(await site.begin(text))

    run(talking)
    assert bodies == [b'{"prompt":"x","top_p":0.50,"priority":null,"priority_class":"batch"}']
