"""Files: uploads, limits and descriptions."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from support.batch_site import FORM, Site, SlowForm, form_of, jsonl, line, run
from support.fakes import FakeEngine
from support.server_client import error_of


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
def test_invalid_page_parameters_are_refused(tmp_path, path, query, param, status):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            return await site.client.get(f"{path}?{query}")

    answer = run(talking)
    assert answer.status_code == status
    assert param is None or error_of(answer)["param"] == param


def test_lists_are_complete_for_equal_creation_times(tmp_path):
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


def test_file_object_has_size_and_expiry(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            about = (await site.client.post("/v1/files", files={"file": ("in", b"x" * 10)}, data=form)).json()
            content = await site.client.get(f"/v1/files/{about['id']}/content")
            await site.batches.stored(BatchStore.expire, about["created_at"] + 3601)
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
def test_invalid_upload_forms_are_refused(tmp_path, form, param):
    async def talking():
        async with Site(FakeEngine(limits={"batch_store_bytes": 2**20}), tmp_path) as site:
            answer = await site.client.post("/v1/files", **form)
            assert (await site.client.get("/v1/files")).json()["data"] == []
            return answer

    answer = run(talking)
    assert error_of(answer)["param"] == param


def test_stored_files_are_limited(tmp_path):
    async def talking():
        async with Site(FakeEngine(limits={"batch_store_bytes": 2**20}), tmp_path) as site:
            content = b"x" * 600_000
            await site.upload(content)
            form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
            refused = await site.client.post("/v1/files", **form)
            return refused, len((await site.client.get("/v1/files")).json()["data"])

    refused, count = run(talking)
    assert (refused.status_code, error_of(refused)["param"], count) == (413, "file", 1)


def test_uploads_may_exceed_the_connection_buffers(tmp_path):
    async def talking():
        async with Site(FakeEngine(limits={"max_buffered_bytes": 2**21}), tmp_path) as site:
            with bind("127.0.0.1", 0) as listener:
                server = HttpServer(site.public, listener, site.engine.config.serving)
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


def test_uploads_are_limited_like_stored_files(tmp_path):
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


@pytest.mark.parametrize(("charset", "name"), [("utf-7", b"+2AA-"), ("undefined", b"a")])
def test_names_that_are_not_text_in_the_charset_of_the_form_are_refused(tmp_path, charset, name):
    parts = (b'name="file"; filename="' + name + b'"', b'name="purpose"')
    form = b"".join(b"--x\r\nContent-Disposition: form-data; " + each + b"\r\n\r\nbatch\r\n" for each in parts)

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            kind = f"multipart/form-data; boundary=x; charset={charset}"
            return await site.client.post("/v1/files", content=form + b"--x--\r\n", headers={"content-type": kind})

    refused = run(talking)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "body")


def test_malformed_forms_leave_no_lines_of_the_parser_in_the_log(tmp_path, caplog):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            headers = {"content-type": "multipart/form-data; boundary=x"}
            return await site.client.post("/v1/files", content=b"garbage", headers=headers)

    assert run(talking).status_code == 400
    assert not [each for each in caplog.records if each.name.startswith("python_multipart")]
