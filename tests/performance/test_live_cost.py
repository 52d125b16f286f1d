"""The command that measures what watching costs, at a master over a device that only pretends."""

from __future__ import annotations

import asyncio
import re

import live_cost
from page_server import PageServer


def test_it_tells_both_and_sees_pictures(capsys):
    with PageServer(step_s=0.002, max_num_seqs=4).serving() as server:
        asyncio.run(live_cost.measure(server.url, 4, 2, 0.4, 1, 100))
    shown = capsys.readouterr().out
    rows = re.findall(r"^\| (\d) \| \d \| [\d.]+ \| [\d.]+ \| \d+ \|$", shown, re.MULTILINE)
    assert rows == ["0", "2"]
    assert float(re.search(r"([\d.]+) pictures/s each", shown)[1]) > 0
