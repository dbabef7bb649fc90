"""What one request took, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Taken:
    """What one request took. Times in seconds of time.perf_counter."""

    want_tokens: int
    since_s: float  # when it was due: queueing at the client is not hidden
    sent_s: float = 0.0
    status: int = 0  # 0: no answer yet
    retry_after: bool = False
    text_s: list[float] = field(default_factory=list)  # each piece of text; one token unless somebody lagged
    ended_s: float = 0.0  # 0: open
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.text_s[0] - self.since_s if self.text_s else 0.0

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in zip(self.text_s, self.text_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.since_s
