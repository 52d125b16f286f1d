"""Lines of a batch: validation, requests and retries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from llm_serving.errors import CapacityError, TooLateError
from llm_serving.server.app import build_site
from llm_serving.server.batches import runner as module
from llm_serving.server.batches.runner import Answered
from llm_serving.server.batches.schemas import Batch
from llm_serving.server.batches.store import BatchStore, new_file, new_id
from llm_serving.server.tenant_quota import TenantQuota
from support.batch_site import Site, jsonl, line, run
from support.fakes import FakeEngine


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "the file has no lines"),
        (b"{", "is not a request"),
        (jsonl(line("a", url="/v1/models")), "`url` must be /v1/completions"),
        (jsonl(line("a"), line("a")), "`custom_id` must be"),
        (jsonl(line("a", stream=True)), "must not set `stream`"),
        (jsonl(line("a") | {"priority": 1}), "unknown field `priority`"),
        (jsonl({"custom_id": "a", "url": "/v1/completions", "body": []}), "`body` must be an object"),
        (
            b'{"custom_id": "a", "custom_id": "b", "url": "/v1/completions", "body": {}}',
            "`custom_id` must be given once",
        ),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"n": 1, "n": 2}}', "`n` must be given once"),
    ],
)
def test_batch_input_errors_are_reported(tmp_path, text, fault):
    engine = FakeEngine()

    async def talking():
        async with Site(engine, tmp_path) as site:
            return await site.ended(await site.begin(text))

    batch = run(talking)
    assert batch["status"] == "failed"
    assert fault in batch["errors"]["data"][-1]["message"]
    assert engine.submitted == []


def test_batch_lines_are_independent_of_file_pieces():
    lines = jsonl(line("a"), line("b")) + b"\n\n"
    for size in (1, 7, len(lines)):
        pieces = [lines[i : i + size] for i in range(0, len(lines), size)]
        assert [number for number, _ in module.lines_of(pieces)] == [1, 2]
        assert module.check_lines(pieces, "/v1/completions") == []


def test_batch_lines_are_limited_in_size_and_number(monkeypatch):
    monkeypatch.setattr(module, "MAX_LINES", 3)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    assert module.check_lines([jsonl(*map(line, "abcd"))], "/v1/completions")[-1].line == 4
    assert module.check_lines([b"x" * 150] * 9, "/v1/completions")[-1].code == "too_long"


def test_batch_accepts_the_deepest_readable_line(tmp_path):
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


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (b"[" + b"[]," * 2**15 + b"[]]", "lists, objects and keys"),
        (b"[" + b'"",' * 2**16 + b'""]', "strings and keys"),
        (b"[" + b"0," * 2**19 + b"0]", "values"),
        (b"1" * 65, "numbers of at most 64 digits"),
    ],
)
def test_batch_refuses_costly_lines_before_parsing(prompt, what):
    """A file has thousands of lines, and parsing one blocks all other work."""
    text = b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": %s}}' % prompt
    [fault] = module.check_lines([text], "/v1/completions")
    assert fault.message.startswith("the line must hold")
    assert what in fault.message


def test_batch_reads_line_bodies_on_demand(tmp_path):
    """A batch has as many lines in progress as requests run at once, and each may have megabytes."""
    asked, may_answer = [], asyncio.Event()

    async def ask(url, body, tenant):
        del url, tenant
        asked.append(body)
        await may_answer.wait()
        return Answered(200, b"{}")

    async def talking():
        async with Site(FakeEngine(limits={"batch_concurrency": 2}), tmp_path) as site:
            site.batches.ask, stored, read = ask, site.batches.stored, []

            async def noted(work, *arguments):
                if work is BatchStore.body:
                    read.append(arguments)
                return await stored(work, *arguments)

            site.batches.stored = noted
            batches = [await site.begin(jsonl(*(line(str(n)) for n in range(5)))) for _ in range(3)]
            while len(asked) < 2:
                await asyncio.sleep(0)
            for _ in range(100):
                await stored(BatchStore.has_room, "")  # whatever can go on has done so by then
            num_read = len(read)
            may_answer.set()
            ended = [await site.ended(each) for each in batches]
            return num_read, [each["request_counts"]["completed"] for each in ended]

    assert run(talking) == (2, [5, 5, 5])


def test_batch_keeps_the_digits_of_numbers(tmp_path):
    bodies = []

    async def ask(url, body, tenant):
        del url, tenant
        bodies.append(body)
        return Answered(200, b"{}")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches.ask = ask
            text = (
                b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "top_p": 0.50, "priority":null}}'
            )
            await site.ended(await site.begin(text))

    run(talking)
    assert bodies == [b'{"prompt":"x","top_p":0.50,"priority":null,"priority_class":"batch"}']


def test_batch_answer_names_ignored_fields(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            lines = jsonl(line("a", store=True, service_tier="flex"), line("b"), line("c", store=True, temperature=-1))
            batch = await site.ended(await site.begin(lines))
            return await site.lines(batch["output_file_id"]), await site.lines(batch["error_file_id"])

    (first, second), (refused,) = run(talking)
    assert first["response"]["ignored_parameters"] == "store, service_tier"
    assert "ignored_parameters" not in second["response"]
    assert "ignored_parameters" not in refused["response"]


def _without_waiting(ask):
    async def asks(*arguments):
        return replace(await ask(*arguments), retry_after_s=None)

    return asks


def test_batch_line_is_retried_while_the_queue_is_full(tmp_path, monkeypatch):
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
            site.batches.ask = _without_waiting(site.batches.ask)
            return await site.ended(await site.begin(jsonl(line("a"))))

    assert run(talking)["request_counts"]["completed"] == 1
    assert len(asked) == 3


@pytest.mark.parametrize(
    "refusal", [TooLateError("the first token is expected in 99 s", 60.0), CapacityError("the queue is full", 60.0)]
)
def test_batch_line_is_retried_within_its_timeout(tmp_path, refusal):
    """A line whose timeout can never suffice would otherwise be retried until the batch expires."""
    engine = FakeEngine(refusal=refusal)

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch = await site.ended(await site.begin(jsonl(line("a", timeout_s=0.01), line("b", timeout_s=50))))
            return batch, await site.lines(batch["error_file_id"])

    batch, errors = run(talking)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 0, "failed": 2})
    assert [each["response"]["status_code"] for each in errors] == [429, 429]
    assert [each["response"]["body"]["error"]["message"] for each in errors] == [str(refusal)] * 2


@pytest.mark.parametrize("timeout_s", [None, 3600, 0, -1, "soon", 2**70])
def test_batch_line_with_a_longer_or_no_timeout_is_retried(tmp_path, monkeypatch, timeout_s):
    """Also a line with an invalid timeout: its route reports the error."""
    monkeypatch.setattr(module, "LEAST_PAUSE_S", 0.0)
    answers = iter([Answered(429, b"{}", 0.0), Answered(503, b"{}", 0.0), Answered(200, b"{}")])

    async def ask(*_):
        return next(answers)

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches.ask = ask
            return await site.ended(await site.begin(jsonl(line("a", timeout_s=timeout_s))))

    assert run(talking)["request_counts"]["completed"] == 1


def test_batch_line_waits_for_room_in_the_store_beyond_its_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_PAUSE_S", 0.0)
    looks = iter([False, False, True])

    async def look(tenant):
        del tenant
        return next(looks)

    async def ask(*_):
        return Answered(200, b"{}")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches._has_room = look
            site.batches.ask = ask
            return await site.ended(await site.begin(jsonl(line("a", timeout_s=1e-9))))

    assert run(talking)["request_counts"]["completed"] == 1
    assert next(looks, None) is None


def test_batch_sends_no_request_while_the_engine_loads(tmp_path, monkeypatch):
    engine = FakeEngine(ready=False)

    async def look(seconds):
        assert engine.submitted == []
        engine.ready = True

    monkeypatch.setattr("llm_serving.server.batches.internal_client.asyncio.sleep", look)
    ask = build_site(engine).internal
    assert asyncio.run(ask("/v1/completions", b'{"prompt": "hello"}', "")).status == 200


def test_retried_batch_line_holds_no_concurrency_slot(tmp_path):
    async def ask(url, body, tenant):
        del url, body
        return Answered(429 if tenant == "refused" else 200, b"{}", 3600.0)

    async def begin(batches, tenant):
        about = new_file(new_id("file"), "in.jsonl", "batch", batches.now())
        await batches.stored(BatchStore.add_file, about, tenant, [jsonl(line("a"), line("b"))], batches.now())
        created = int(batches.now())
        batch = Batch(
            id=new_id("batch"), endpoint="/v1/completions", input_file_id=about.id, created_at=created,
            expires_at=created + 3600,
        )  # fmt: skip
        await batches.create(batch, tenant)
        return batch.id

    async def talking():
        shares = TenantQuota(2**20)
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


def test_batch_lines_wait_for_room_in_the_store(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "LEAST_PAUSE_S", 0.0)
    answer, asked = b'"' + b"x" * 10_000 + b'"', []

    async def ask(url, body, tenant):
        del url, body, tenant
        asked.append(1)
        return Answered(200, answer)

    async def talking():
        engine = FakeEngine(limits={"batch_store_bytes": 100_000, "batch_concurrency": 2})
        async with Site(engine, tmp_path) as site:
            site.batches.ask = ask
            other = await site.upload(b"x" * 50_000)
            batch_id = await site.begin(jsonl(*(line(str(n)) for n in range(9))))
            while "no room: files and batches have at most 100000 bytes" not in caplog.text:
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
