import asyncio
import statistics
from itertools import pairwise

from load_test import runner
from load_test.api_client import GenerationOptions
from load_test.http_client import HttpClient, HttpError
from load_test.metrics import RequestRecord
from load_test.runner import Job, Load, plan, run_load
from load_test.workload import Prompt

OPTIONS = GenerationOptions("openai", "demo")


def test_interrupted_run_records_unanswered_requests(fake_server):
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


def test_records_are_kept_if_the_server_ends_during_the_run(fake_server, monkeypatch):
    scrapes = []

    async def scrape(http):
        scrapes.append(http)
        if len(scrapes) > 1:
            raise HttpError("connection refused")
        return 1.0

    monkeypatch.setattr(runner, "server_cpu_s", scrape)
    http, jobs = HttpClient("127.0.0.1", fake_server.port), [Job(Prompt("Hello", "ok", "greet"), 4)]
    result = asyncio.run(run_load(http, OPTIONS, jobs, Load(), lambda record: None))
    assert [record.error for record in result.records] == [None]
    assert result.server_cpu_s is None


def test_reference_tokens_are_counted_once_for_each_text_if_the_server_can(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    prompts = [Prompt("a", "one two", "task"), Prompt("b", "one two", "task"), Prompt("c", "one"), Prompt("d")]
    assert [job.max_tokens for job in asyncio.run(plan(http, prompts, None))] == [3, 3, 1, 300]
    fake_server.has_tokenizer = False
    assert [job.max_tokens for job in asyncio.run(plan(http, prompts, None))] == [9, 9, 9, 300]
    assert [job.max_tokens for job in asyncio.run(plan(http, prompts, 5))] == [5, 5, 5, 5]


def test_poisson_arrivals_depend_on_their_seed():
    assert runner.poisson(10, 50, seed=3) == runner.poisson(10, 50, seed=3)
    assert runner.poisson(10, 50, seed=3) != runner.poisson(10, 50, seed=4)


def test_longer_poisson_schedule_starts_with_the_shorter_one():
    assert runner.poisson(2, 100, seed=1)[:10] == runner.poisson(2, 10, seed=1)


def test_poisson_gaps_have_an_exponential_mean_and_deviation():
    gaps = [b - a for a, b in pairwise([0.0, *runner.poisson(10, 20_000, seed=1)])]
    assert all(gap >= 0 for gap in gaps)
    # The standard error of the mean of 20,000 exponential gaps is 0.7 %; of their deviation 1 %.
    assert abs(statistics.fmean(gaps) / 0.1 - 1) < 0.03
    assert abs(statistics.stdev(gaps) / 0.1 - 1) < 0.04


def test_fixed_arrivals_have_equal_gaps():
    assert runner.fixed(4, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bursts_keep_the_mean_rate():
    assert runner.burst(2, 7, burst_size=3) == [0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 3.0]


def test_open_loop_sends_each_request_without_waiting_for_answers():
    sent: list[int] = []

    async def run() -> None:
        all_sent = asyncio.Event()

        async def send(index: int, due: float) -> None:
            sent.append(index)
            if len(sent) == 4:
                all_sent.set()
            await all_sent.wait()  # no request is answered before all were sent

        await runner.open_loop([0.0, 0.0, 0.001, 0.002], send)

    asyncio.run(run())
    assert sent == [0, 1, 2, 3]


def test_open_loop_passes_the_due_time_of_each_request():
    dues: list[float] = []

    async def send(index: int, due: float) -> None:
        dues.append(due)

    asyncio.run(runner.open_loop([0.0, 0.0, 0.003], send))
    assert dues[1] == dues[0]
    assert round(dues[2] - dues[0], 9) == 0.003


def test_closed_loop_keeps_exactly_the_given_concurrency():
    outstanding = 0
    seen: list[int] = []
    indices: list[int] = []

    async def send(index: int, due: float) -> None:
        nonlocal outstanding
        outstanding += 1
        await asyncio.sleep(0)
        seen.append(outstanding)
        outstanding -= 1
        indices.append(index)

    asyncio.run(runner.closed_loop(10, 3, send))
    assert sorted(indices) == list(range(10))
    assert max(seen) == 3


def test_closed_loop_with_more_clients_than_requests_sends_each_once():
    indices: list[int] = []

    async def send(index: int, due: float) -> None:
        indices.append(index)

    asyncio.run(runner.closed_loop(2, 100, send))
    assert indices == [0, 1]
