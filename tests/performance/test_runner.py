import asyncio

from client import GenerationOptions
from http_client import HttpClient
from records import RequestRecord
from runner import Job, Load, plan, run_load
from workload import Prompt

OPTIONS = GenerationOptions("openai", "demo")


def test_an_interrupted_run_records_what_was_not_answered(fake_server):
    records: list[RequestRecord] = []

    async def main():
        jobs = [Job(Prompt(text, "ok", "greet"), 4) for text in ("Hello", "silent", "silent", "Hello")]

        def interrupt_after_the_first(record: RequestRecord) -> None:
            records.append(record)
            if len(records) == 1:
                run.cancel()

        http = HttpClient("127.0.0.1", fake_server.port)
        run = asyncio.create_task(run_load(http, OPTIONS, jobs, Load(concurrency=3), interrupt_after_the_first))
        return await run

    result = asyncio.run(main())
    assert result.records == records
    assert [(r.index, r.error) for r in records] == [
        (0, None),
        (1, "the run was interrupted"),
        (2, "the run was interrupted"),
        (3, "the run was interrupted"),
    ]


def test_each_distinct_reference_is_counted_once_and_not_at_all_where_the_server_cannot(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    prompts = [Prompt("a", "one two", "task"), Prompt("b", "one two", "task"), Prompt("c", "one"), Prompt("d")]
    assert [job.max_tokens for job in asyncio.run(plan(http, prompts, None))] == [3, 3, 1, 300]
    fake_server.has_tokenizer = False
    assert [job.max_tokens for job in asyncio.run(plan(http, prompts, None))] == [9, 9, 9, 300]
    assert [job.max_tokens for job in asyncio.run(plan(http, prompts, 5))] == [5, 5, 5, 5]
