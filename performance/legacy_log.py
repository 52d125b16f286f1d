"""The files of the legacy load test, in its formats: the log of a run and `result_<X>_x.json`."""

import json
import time
from pathlib import Path
from typing import TextIO

from records import RequestRecord


def legacy_fields(record: RequestRecord) -> dict[str, str | float]:
    """What the legacy log says of a request; times in seconds. A failed request carries its error as its text."""
    return {
        "input": record.prompt,
        "resp_text": record.text if record.ok else f"error: {record.error}",
        "res_time": record.latency_s,
        "first_token_time": record.ttft_s,
    }


class LegacyLog:
    """`testLog/test_performance_<YYYY-mm-dd-HH_MM>.log` under `folder`; runs of the same minute share a file."""

    def __init__(self, folder: Path, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_done = 0
        self.path = folder / "testLog" / f"test_performance_{time.strftime('%Y-%m-%d-%H_%M')}.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written through line by line, so that a run can be followed.
        self._file: TextIO = self.path.open("a", encoding="utf-8", buffering=1)

    def add(self, record: RequestRecord) -> None:
        self._num_done += 1
        self._file.write(f"{legacy_fields(record)}\nTest Progress --> {self._num_done}/{self._num_requests}\n")

    def close(self, exec_time_s: float) -> None:
        self._file.write(f"All Tasks Done; Exec Time is {exec_time_s}\n")
        self._file.close()


def write_result(folder: Path, name: str, records: list[RequestRecord]) -> Path:
    """Writes `result_<name>.json`: one object a request, the fields of the log."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"result_{name}.json"
    path.write_text(json.dumps([legacy_fields(r) for r in records], ensure_ascii=False, indent=1), encoding="utf-8")
    return path
