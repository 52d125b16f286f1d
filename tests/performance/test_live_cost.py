"""The command that measures what watching costs, at a master over a device that only pretends."""

from __future__ import annotations

import asyncio
import os
import re
from math import inf

import live_cost
import numpy as np
import pytest
from live_cost import Cost, Span
from llm_serving.server.admin import live
from support.page_server import PageServer


def pairs_of(cost, num_pairs, noise):
    """A master that needs 0.1 ms a step and 10 us a token, and so much for those who watch."""
    rng = np.random.default_rng(1)
    pairs = []
    for _ in range(num_pairs):
        spans = []
        for own in (0.0, cost):
            steps = rng.uniform(300, 500)
            tokens = 128 * steps + rng.uniform(-500, 500)
            cpu = own + 1e-4 * steps + 1e-5 * tokens + rng.normal(0, noise)
            spans.append(Span(cpu, steps, tokens, 128.0, 4.0 if own else 0.0))
        pairs.append(tuple(spans))
    return pairs


def test_what_steps_and_tokens_account_for_is_no_cost_of_watching():
    assert live_cost.cost_of(pairs_of(0.004, 20, 0.0)).mean == pytest.approx(0.004)
    noisy = live_cost.cost_of(pairs_of(0.004, 40, 0.005))
    assert 0.001 < noisy.half_width < 0.004
    assert abs(noisy.mean - 0.004) < noisy.half_width


def test_too_few_pairs_decide_nothing():
    assert live_cost.cost_of(pairs_of(0.004, 3, 0.0)).half_width == inf


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)])
def test_quantiles_are_those_of_tables(freedom, quantile):
    assert live_cost.student(freedom) == pytest.approx(quantile, rel=0.006)


def test_the_verdict_follows_from_the_interval():
    pairs = pairs_of(0.004, 4, 0.0)
    assert "1.00 ms a picture): below 1 %" in live_cost.verdict(Cost(0.004, 0.001), pairs, 1.0)
    assert "not decided" in live_cost.verdict(Cost(0.004, 0.007), pairs, 1.0)
    assert "above 1 %" in live_cost.verdict(Cost(0.02, 0.007), pairs, 1.0)


def test_it_tells_both_and_sees_pictures(capsys, monkeypatch):
    monkeypatch.setattr(live_cost, "SETTLE_S", 0.0)
    monkeypatch.setattr(live, "pause_s", lambda cost_s: 0.01)
    with PageServer(step_s=0.002, max_num_seqs=4).serving() as server:
        given = ["--url", server.url, "--running", "4", "--viewers", "2", "--minutes", "0", "--max-tokens", "100"]
        for seconds in ("0.1", "1", "10"):  # on a busy machine no picture may come in a short span
            code = asyncio.run(live_cost.measure(live_cost.parser().parse_args([*given, "--seconds", seconds])))
            shown = capsys.readouterr().out
            assert code == 2
            rows = re.findall(r"^\| (\d) \| \d \| [\d.]+ \| [\d.]+ \| \d+ \| ([\d.]+) \|$", shown, re.MULTILINE)
            assert [name for name, _ in rows] == ["0", "2"]
            assert float(rows[0][1]) == 0.0
            assert "(95 % interval -inf to inf, 1 pairs" in shown
            if float(rows[1][1]) > 0.0:
                break
        assert float(rows[1][1]) > 0.0
        assert live_cost.master_of(int(server.url.rsplit(":", 1)[1])) == os.getpid()
