"""What became of a request of a load, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.core.request_class import RequestClass


@dataclass(slots=True)
class Outcome:
    """Times in seconds from the beginning of the load."""

    stream: str
    request_class: RequestClass
    tenant: str
    num_prompt_tokens: int
    num_wanted: int
    """Tokens that its answer has when it is complete."""
    due_s: float
    """When it came for the first time."""
    end_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    finish: str = ""
    """Why it ended: a finish reason, or `refused`."""
    error: str = ""
    num_retries: int = 0
    num_cached_tokens: int = 0
    """Of its prompt, that were found computed."""

    @property
    def ok(self) -> bool:
        return self.finish in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """None: it has fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def met_slo(self) -> bool:
        """Whether it was answered within what its class promises."""
        ttft, tpot, promised = self.ttft_s, self.tpot_s, self.request_class
        if not self.ok or ttft is None:
            return False
        if promised.ttft_slo_s is not None and ttft > promised.ttft_slo_s:
            return False
        return promised.tpot_slo_s is None or tpot is None or tpot <= promised.tpot_slo_s
