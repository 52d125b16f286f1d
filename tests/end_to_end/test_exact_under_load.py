"""The shipped model through the real scripts and processes: answers are right, and the same alone and under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from support.server_process import ROOT, Server, metric, shared_memory_names, start_server

pytestmark = pytest.mark.end_to_end

QUESTIONS: list[dict[str, str]] = json.loads(
    (ROOT / "llm-serving" / "llm_serving" / "demo_model" / "questions.json").read_text()
)

COMPILATIONS = "llm_serving:graph_compilations"


def prompt_of(question: dict[str, str]) -> str:
    return f"{question['instruction']} {question['input']}".strip()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    before = shared_memory_names()
    settings = ("--set", "pa_config.num_blocks=160", "--set", "scheduler_config.max_prefill_tokens=256")
    server = start_server(*settings, by_script=True)
    yield server
    server.stop()
    ended, alive = psutil.wait_procs(server.processes, timeout=60)
    assert len(ended) == 2 and not alive
    assert shared_memory_names() == before


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Return requests with short and long prompts and answers, greedy and sampled, with and without logprobs."""
    requests = []
    for index in range(count):
        question = QUESTIONS[index * 7 % len(QUESTIONS)]
        request: dict[str, Any] = {"prompt": prompt_of(question), "max_tokens": 8 + index % 56}
        if index % 5 == 1:
            request["prompt"] = " ".join([request["prompt"]] * (2 + index % 9))
        if index % 3 == 2:
            request |= {"temperature": 1.2, "top_p": 0.95, "seed": index, "ignore_eos": True}
        else:
            request |= {"temperature": 0}
        if index % 4 == 3:
            request |= {"logprobs": 3}
        if index % 6 == 5:
            request |= {"repetition_penalty": 1.3, "presence_penalty": 0.4}
        requests.append(request | {"return_token_ids": True, "priority": index % 3})
    return requests


REQUESTS = mixed_requests(64)


async def complete(client: httpx.AsyncClient, request: dict[str, Any]) -> bytes:
    """Return the answer without the fields that differ for each call."""
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return json.dumps(choices, sort_keys=True).encode()


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, list[int]]:
    text, token_ids = "", []
    async with client.stream("POST", "/v1/completions", json=request | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    token_ids += choice.get("token_ids") or []
    return text, token_ids


@pytest.fixture(scope="module")
def reference(server: Server) -> list[bytes]:
    """Return the answers to `REQUESTS`, each computed when no other request runs."""

    async def run() -> list[bytes]:
        async with server.client() as client:
            return [await complete(client, request) for request in REQUESTS]

    return asyncio.run(run())


def test_64_concurrent_answers_equal_the_reference_answers(server: Server, reference: list[bytes]) -> None:
    async def run() -> list[bytes]:
        async with server.client() as client:
            return list(await asyncio.gather(*(complete(client, request) for request in REQUESTS)))

    assert asyncio.run(run()) == reference
    assert len(set(reference)) > 40, "the requests are meant to differ"


def test_streams_under_load_equal_the_reference_answers(server: Server, reference: list[bytes]) -> None:
    whole = [json.loads(answer)[0] for answer in reference[:24]]

    async def run() -> None:
        async with server.client() as client:
            streams = await asyncio.gather(*(stream(client, request) for request in REQUESTS[:24]))
        assert [text for text, _ in streams] == [choice["text"] for choice in whole]
        assert [ids for _, ids in streams] == [choice["token_ids"] for choice in whole]

    asyncio.run(run())


def test_server_compiles_no_graph_while_serving(server: Server) -> None:
    async def run() -> None:
        async with asyncio.timeout(300), server.client() as client:
            await complete(client, {"prompt": "Add 17 and 25.", "max_tokens": 1})
            after_warm_up = await metric(client, COMPILATIONS)
            for count in (1, 3, 24, 7):  # batches of every size, with prompts arriving and answers ending
                await asyncio.gather(*(complete(client, request) for request in mixed_requests(count)))
            # The whole network, and its two parts for steps that return more than tokens.
            assert await metric(client, COMPILATIONS) == after_warm_up == 3

    asyncio.run(run())


def test_shipped_model_answers_its_questions(server: Server) -> None:
    questions = QUESTIONS[:: max(1, len(QUESTIONS) // 96)]

    async def answer(client: httpx.AsyncClient, question: dict[str, str]) -> bool:
        body = {"prompt": prompt_of(question), "max_tokens": 600, "temperature": 0}
        response = await client.post("/v1/completions", json=body)
        return bool(response.json()["choices"][0]["text"].strip() == question["output"].strip())

    async def run() -> list[bool]:
        async with server.client() as client:
            return list(await asyncio.gather(*(answer(client, question) for question in questions)))

    right = asyncio.run(run())
    assert sum(right) >= 0.95 * len(right)


NUM_CHOICES = 16


async def aborted(client: httpx.AsyncClient) -> float:
    return await metric(client, "vllm:request_success_total", 'finished_reason="abort"')


def test_request_is_freed_when_its_client_disconnects(server: Server) -> None:
    async def run() -> None:
        async with server.client() as client:
            aborted_before = await aborted(client)
            # Too long to be computed before the client disconnects, also on a busy machine.
            body = {"prompt": "Count from 1 to 9.", "max_tokens": 900, "ignore_eos": True, "stream": True}
            body |= {"n": NUM_CHOICES, "temperature": 4.0}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
                assert await metric(client, "vllm:num_requests_running") >= 1  # an audit may run as well
            async with asyncio.timeout(300):
                while await metric(client, "vllm:num_requests_running") > 0:
                    await asyncio.sleep(0)
            assert await metric(client, "vllm:kv_cache_usage_perc") == 0
            assert await aborted(client) == aborted_before + NUM_CHOICES

    asyncio.run(run())


def test_preempted_requests_are_completed(server: Server) -> None:
    """With 160 blocks requests are preempted and recomputed; their answers equal the reference answers."""
    requests = [
        {"prompt": f"Say {index}.", "max_tokens": 200, "ignore_eos": True, "temperature": 0} for index in range(24)
    ]

    async def run() -> None:
        async with server.client() as client:
            together = await asyncio.gather(*(complete(client, request) for request in requests))
            assert await metric(client, "vllm:num_preemptions_total") > 0
            reference = [await complete(client, request) for request in requests[-6:]]
        assert together[-6:] == reference

    asyncio.run(run())


async def timed(client: httpx.AsyncClient, number: int) -> float:
    """Return the milliseconds from sending a request to the end of its answer."""
    body = {
        "request_id": f"load-{number}",
        "prompt": "Once upon a time there was a king " * (1 + number % 3),
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": number % 2 == 0,
        "priority_class": ("interactive", "standard", "batch")[number % 3],
    }
    began = time.monotonic()
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return 1000 * (time.monotonic() - began)


def test_reported_request_time_is_at_most_the_time_measured_by_the_client(server: Server) -> None:
    async def run() -> tuple[list[float], list[dict[str, Any]], dict[str, Any]]:
        async with server.client() as client:
            measured = await asyncio.gather(*(timed(client, number) for number in range(24)))
            explained = []
            for number in range(24):
                [each] = (await client.get(f"/v1/requests/cmpl-load-{number}/explain")).json()["requests"]
                explained.append(each)
            return measured, explained, (await client.get("/v1/timeline")).json()

    measured, explained, trace = asyncio.run(run())
    for milliseconds, each in zip(measured, explained, strict=True):
        assert abs(sum(part["ms"] for part in each["parts"]) - each["wall_ms"]) < 1.0
        assert 0.0 < each["wall_ms"] <= milliseconds
        assert {"tokenizing", "prefill", "decode", "sending"} <= {part["what"] for part in each["parts"]}
        assert (each["finish_reason"], each["tokens"]["output"]) == ("length", 200)
    assert sum(each["num_preemptions"] for each in explained) > 0
    assert any(part["what"] == "preempted" for each in explained for part in each["parts"])
    names = {event["args"].get("name") for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"steps", *(each["id"] for each in explained)} <= names


def test_openai_client_gets_the_same_chat_answer_whole_and_streamed(server: Server) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = QUESTIONS[0]
    messages: Any = [{"role": "user", "content": prompt_of(question)}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64)
    pieces = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64, stream=True)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert streamed == whole.choices[0].message.content
    assert streamed.strip() == question["output"]


def test_legacy_stream_ends_with_the_whole_text(server: Server) -> None:
    question = QUESTIONS[1]
    parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": 64}
    body = {"inputs": prompt_of(question), "parameters": parameters, "stream": True}
    lines = httpx.post(f"{server.url}/models/llama2/generate_stream", json=body, timeout=60.0).text.splitlines()
    texts = [json.loads(line)["data"][0]["generated_text"] for line in lines if line]
    assert "".join(texts[:-1]) == texts[-1]
    assert texts[-1].strip() == question["output"]


def test_server_log_has_the_maximum_output_length(server: Server) -> None:
    assert "'max_token_len': " in server.log
