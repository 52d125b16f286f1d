"""The real master at a port, over a fake device whose steps have a given duration."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvloop
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.server.app import build_site
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from support.gated_server import GatedRunner, GatedServer


class SlowRunner(GatedRunner):
    """A fake runner whose steps take `step_s` while its gate is open."""

    step_s = 0.0

    def execute(self, step: StepInput) -> StepOutput:
        time.sleep(self.step_s)
        return super().execute(step)


class PageServer(GatedServer):
    """A `GatedServer` that listens at a URL."""

    def __init__(self, step_s: float = 0.01, **options: Any) -> None:
        super().__init__(**options)
        self.runner = SlowRunner()
        self.runner.step_s = step_s
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[PageServer]:
        ready = threading.Event()
        with bind("127.0.0.1", 0) as listener:
            site, limits = build_site(self.engine), replace(self.engine.config.serving, shutdown_timeout_s=0.1)
            http = HttpServer(site.public, listener, limits, site.public.refused, on_shutdown=site.routes.live.close)

            async def serve() -> None:
                self.engine.start()
                while not self.engine.health().ready:
                    await asyncio.sleep(0.01)
                ready.set()
                await http.serve([listener])
                self.runner.gate.set()
                await self.engine.stop()

            def run() -> None:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(serve())

            thread = threading.Thread(target=run)
            thread.start()
            assert ready.wait(30)
            self.url = "http://{}:{}".format(*listener.getsockname())
            try:
                yield self
            finally:
                http.should_exit = True
                thread.join()
