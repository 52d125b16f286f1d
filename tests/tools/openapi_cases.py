"""Send requests that schemathesis makes from the OpenAPI document to the application over a fake engine.

    python tests/tools/openapi_cases.py --examples 2000

A body that the document allows must be answered, or refused because of a field for which the document describes the
refusal. Other bodies must be refused or answered. No status may be 500 or above.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from llm_serving.server.app import create_app
from llm_serving.server.openapi import LIMITS, OTHER_RANGES, openapi_document
from llm_serving.server.routes import ENDPOINTS
from schemathesis.generation import GenerationMode
from support.fakes import FakeEngine

MODEL = "demo"
WITHOUT_END = "/v1/live"
"""Routes whose answers end only when the client disconnects, which these clients never do."""
DOCUMENT = openapi_document(ENDPOINTS, with_keys=False)


def operations() -> dict[str, Any]:
    """Return every operation of the document by method and path."""
    found = (result.ok() for result in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations())
    return {f"{each.method.upper()} {each.path}": each for each in found if each.path != WITHOUT_END}


def check_operation(operation: Any, mode: GenerationMode, examples: int, first_seed: int = 1) -> Counter[int]:
    """Send that many requests; return the number of each status.

    Raises:
        AssertionError: The document does not describe an answer.
    """
    app = create_app(FakeEngine(model_name=MODEL, max_body_bytes=2**20))
    statuses: Counter[int] = Counter()

    @seed(first_seed)
    @settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = asyncio.run(answer_to(app, case))
        statuses[answer.status_code] += 1
        check_answer(answer, positive=mode is GenerationMode.POSITIVE)

    send()
    return statuses


PHASES = (Phase.generate,)


async def answer_to(app: Any, case: Any) -> httpx.Response:
    for name in ("model", "name"):
        if name in (case.path_parameters or {}):
            case.path_parameters[name] = MODEL
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    sent = case.as_transport_kwargs(base_url="http://localhost")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        names = {"method", "url", "params", "json", "headers"}
        body = {"content": sent["data"]} if sent.get("data") is not None else {}
        given = {name: value for name, value in sent.items() if name in names}
        given["headers"] = dict(given.get("headers") or {})
        return await client.request(**given, **body)


def check_answer(answer: httpx.Response, *, positive: bool) -> None:
    assert answer.status_code < 500, answer.text
    if answer.is_success or not positive:
        return
    if answer.status_code == 404 and "no such route" in answer.text:
        return  # a name that contains characters which end a path
    if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return  # no capacity for that many choices now; the body is valid
    field = refused_field(answer)
    assert field in LIMITS or field in OTHER_RANGES, f"refused for a reason that is not in the document: {answer.text}"


def refused_field(answer: httpx.Response) -> str:
    """Return the field that an error names, the last one of a path such as `messages[0].content`."""
    message = json.loads(answer.text)
    text = message["error"]["message"] if isinstance(message.get("error"), dict) else str(message)
    found = re.search(r"`([^`]*)`", text)
    names = re.sub(r"\[\d*\]", "", found[1]).split(".") if found else [""]
    return next((name for name in reversed(names) if name in LIMITS or name in OTHER_RANGES), names[-1])


def all_checks() -> Iterator[tuple[str, Callable[[int], Counter[int]]]]:
    """Check each operation with bodies that the document allows, and with others."""
    for name, operation in operations().items():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.POSITIVE or operation.body:
                yield f"{name}, {mode.value}", lambda n, o=operation, m=mode: check_operation(o, m, n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--examples", type=int, default=1000, help="requests of each kind to each route (default: 1000)"
    )
    examples = parser.parse_args().examples
    logging.disable(logging.CRITICAL)
    failed = 0
    for name, check in all_checks():
        try:
            counts = ", ".join(f"{count} of {int(status)}" for status, count in sorted(check(examples).items()))
        except AssertionError as error:
            failed += 1
            counts = f"FAILED: {error}"
        sys.stdout.write(f"{name}: {counts}\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
