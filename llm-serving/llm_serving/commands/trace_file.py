"""Fetching the timeline of a running server into a file."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from llm_serving.commands.flags import API_KEY_VARIABLE
from llm_serving.errors import LLMServingError, UnavailableError

TIMEOUT_S: Final = 60.0


def save_timeline(url: str, output: Path, num_steps: int | None = None) -> int:
    """Writes the trace that `GET /v1/timeline` answers.

    Returns:
        The number of its events.

    Raises:
        UnavailableError: No server answers at the address.
        LLMServingError: It refuses, or the file cannot be written.
    """
    query = "" if num_steps is None else f"?steps={num_steps}"
    key = os.environ.get(API_KEY_VARIABLE)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if not url.startswith(("http://", "https://")):
        raise LLMServingError(f"--url must begin with http:// or https://. Given: {url}")
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/timeline{query}", headers=headers)  # noqa: S310  checked above
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            content = answer.read()
        events = json.loads(content)["traceEvents"]
        output.write_bytes(content)
    except urllib.error.HTTPError as error:
        raise LLMServingError(f"{url} answers {error.code}: {error.read(1000).decode('utf-8', 'replace')}") from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no server answers at {url}: {error.reason}") from None
    except (ValueError, KeyError, TypeError):
        raise LLMServingError(f"{url} does not answer with a trace") from None
    except OSError as error:
        raise LLMServingError(f"{output}: {error.strerror or error}") from None
    return len(events)
