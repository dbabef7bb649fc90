"""Raw times to figures: the same code for servers and for engines that run in a driver's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from benchmarks.peers.processes import Spent
from headrace.bench.report import percentile
from headrace.bench.taken import Taken


@dataclass(frozen=True)
class Figures:
    """One engine under one load. Times in milliseconds unless named otherwise.

    ``tokens_per_s`` is of full load: from the first request to the moment at which the last one was sent. After that
    users leave one by one, and what is measured is a smaller batch. ``tokens_per_s_whole`` is of everything.
    """

    engine: str
    load: str
    requests: int
    failed: int
    seconds: float
    output_tokens: int
    tokens_per_s: float
    tokens_per_s_whole: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    pieces_per_token: float
    """Below 1 where an engine sent several tokens at once; gaps are between pieces."""
    cpu_s_per_1000: float
    cpu_s_per_1000_by_process: Mapping[str, float]
    client_cpu_s_per_1000: float
    others_share: float
    """CPU of foreign processes, as a share of one CPU."""
    steal_share: float
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def check_counts(taken: list[Taken]) -> None:
    """Note as its error where a request did not get exactly the tokens that it asked for, or got none in time."""
    for one in taken:
        if one.error:
            continue
        if one.completion_tokens != one.want_tokens:
            one.error = f"{one.completion_tokens} tokens instead of {one.want_tokens}"
        elif not one.text_s:
            one.error = f"{one.completion_tokens} tokens, but nothing was seen to arrive"
        elif len(one.text_s) > one.completion_tokens:
            one.error = f"{len(one.text_s)} pieces of text for {one.completion_tokens} tokens"


def figures(engine: str, load: str, taken: list[Taken], used: Spent) -> Figures:
    """Raises ValueError where nothing was sent."""
    check_counts(taken)
    good = [one for one in taken if not one.error]
    began = min(one.since_s for one in taken)
    ended = max(one.ended_s for one in taken)
    last_sent = max(one.since_s for one in taken)
    tokens = sum(one.completion_tokens for one in good)
    whole = tokens / (ended - began) if ended > began else 0.0
    thousands = tokens / 1000 or float("inf")
    ttft = [one.ttft_s * 1e3 for one in good]
    itl = [gap * 1e3 for one in good for gap in one.itl_s]
    return Figures(
        engine=engine,
        load=load,
        requests=len(taken),
        failed=len(taken) - len(good),
        seconds=ended - began,
        output_tokens=tokens,
        tokens_per_s=full_load_rate(good, began, last_sent) or whole,
        tokens_per_s_whole=whole,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p99=percentile(ttft, 0.99),
        itl_p50=percentile(itl, 0.5),
        itl_p99=percentile(itl, 0.99),
        pieces_per_token=sum(len(one.text_s) for one in good) / tokens if tokens else 0.0,
        cpu_s_per_1000=sum(used.engine.values()) / thousands,
        cpu_s_per_1000_by_process={name: cpu_s / thousands for name, cpu_s in used.engine.items()},
        client_cpu_s_per_1000=used.client / thousands,
        others_share=used.others / used.seconds if used.seconds else 0.0,
        steal_share=used.steal / used.seconds if used.seconds else 0.0,
        errors=sorted({one.error for one in taken if one.error})[:3],
    )


def full_load_rate(taken: list[Taken], began_s: float, last_sent_s: float) -> float:
    """Output tokens a second between the two moments; 0 where less than one request in two was over by then.

    A piece of an answer counts for its share of the answer's tokens: it may hold several.
    """
    over = sum(one.ended_s <= last_sent_s for one in taken)
    if not taken or over * 2 < len(taken):
        return 0.0
    tokens = 0.0
    for one in taken:
        pieces = sum(at <= last_sent_s for at in one.text_s)
        tokens += one.completion_tokens * pieces / len(one.text_s)
    return tokens / (last_sent_s - began_s)
