"""Sixteen workers, short questions and long documents: what these cost those, in one pool and in two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.simulate.figures.claim import Bench, Holds, Row, Section
from headrace.simulate.report import SERVED, percentile
from headrace.simulate.scenario import Run, Scenario
from headrace.simulate.workload import LENGTHS, Request, merged, stream

_WORKERS, _LONG = 16, 4
_LONG_FROM = 2000
"""Prompt tokens: between the longest question and the shortest document."""

_QUESTIONS = 60.0
_DOCUMENTS = (1.0, 2.0, 3.0)
"""Arrivals a second."""

_ONE = Scenario(workers=_WORKERS, max_model_len=32_768).with_limits(target_itl_ns=60_000_000)
_TWO = replace(_ONE, worker_pools=f"short={_WORKERS - _LONG},long={_LONG}").with_limits(
    pools=f"short:-{_LONG_FROM - 1},long:{_LONG_FROM}-", pool_lend=""
)
_AS_SOON = 1.1
"""Times the TTFT p99 of one pool: so far two pools are no worse. Their tail is of short prompts that come together, to
fewer workers."""

_BURST = 1400  # questions at once
_SLOTS = 64  # of a worker, then


@dataclass(frozen=True)
class _Kind:
    """Figures of one kind of request, in ms."""

    ttft_p50: float
    ttft_p99: float
    e2e_p50: float
    e2e_p99: float


def isolation(bench: Bench) -> list[Section]:
    seconds = bench.seconds(30, 6)
    variants = {"one pool": _ONE, "two pools": _TWO}
    table = [[
        "documents /s", "workers", "short ITL p99 ms", "short ITL p99.9 ms", "short TTFT p50 ms", "short TTFT p99 ms",
        "short e2e p99 s", "document TTFT p50 s", "document e2e p50 s", "tok/s",
    ]]  # fmt: skip
    itl: dict[tuple[float, str], float] = {}
    found: dict[tuple[float, str], tuple[_Kind, _Kind]] = {}
    for rate in _DOCUMENTS:
        requests = merged(
            stream(LENGTHS["chat"], int(_QUESTIONS * seconds), 5, _QUESTIONS),
            stream(LENGTHS["document"], max(4, int(rate * seconds)), 5, rate),
        )
        for name, scenario in variants.items():
            one = bench.run(scenario, requests, f"{name}, {rate:.0f} documents/s", watch=_is_short)
            short, long = found[rate, name] = _kinds(one)
            gaps = one.measured.watched_gaps
            itl[rate, name] = gaps.quantile_ns(0.99) / 1e6
            table.append([
                f"{rate:.0f}", name, f"{itl[rate, name]:.1f}", f"{gaps.quantile_ns(0.999) / 1e6:.1f}",
                f"{short.ttft_p50:.0f}", f"{short.ttft_p99:.0f}", f"{short.e2e_p99 / 1e3:.1f}",
                f"{long.ttft_p50 / 1e3:.2f}", f"{long.e2e_p50 / 1e3:.2f}", f"{one.figures.tokens_per_s:.0f}",
            ])  # fmt: skip

    def draw(path: Path) -> None:
        from headrace.simulate.picture import curves

        values = {
            "short requests: between tokens, p99 ms": itl,
            "short requests: first token, p99 ms": {key: short.ttft_p99 for key, (short, _) in found.items()},
            "documents: first token, p50 s": {key: long.ttft_p50 / 1e3 for key, (_, long) in found.items()},
        }
        panels = {
            title: {name: (_DOCUMENTS, [told[rate, name] for rate in _DOCUMENTS]) for name in variants}
            for title, told in values.items()
        }
        curves(path, "documents a second", panels)

    most = _DOCUMENTS[-1]
    (one_short, one_long), (two_short, two_long) = found[most, "one pool"], found[most, "two pools"]
    better = [
        itl[rate, "two pools"] < itl[rate, "one pool"]
        and found[rate, "two pools"][0].ttft_p99 <= _AS_SOON * found[rate, "one pool"][0].ttft_p99
        for rate in _DOCUMENTS
    ]
    row = Row(
        "long-context requests in a pool of their own leave interactive ones alone",
        f"beside {most:.0f} documents/s, short requests: ITL p99 {itl[most, 'two pools']:.1f} ms against "
        f"{itl[most, 'one pool']:.1f} in one pool, TTFT p99 {two_short.ttft_p99:.0f} ms against "
        f"{one_short.ttft_p99:.0f}; the documents' TTFT p50 {two_long.ttft_p50 / 1e3:.2f} s against "
        f"{one_long.ttft_p50 / 1e3:.2f}, end to end {two_long.e2e_p50 / 1e3:.1f} s against "
        f"{one_long.e2e_p50 / 1e3:.1f}",
        f"chat at {_QUESTIONS:.0f}/s ({LENGTHS['chat'].text}) and documents ({LENGTHS['document'].text}), Poisson, "
        f"{seconds:.0f} s; {_WORKERS} workers of Llama-3.1-8B on one A100-80 each, {_LONG} of them for prompts from "
        f"{_LONG_FROM} tokens on; a target ITL of 60 ms",
        "the same core and workers in one pool, chunked prefill and placement as ever",
        Holds.YES if all(better) else Holds.PARTLY if any(better) else Holds.NO,
        "what is left of the ITL's tail are the chunks of short prompts. The documents share fewer workers, with fewer "
        "decodes beside them: what that is to them at each rate is in the table" + _beside_fewest(itl, found),
    )
    return [Section("Long and short apart", [row, _lending(bench)], table, picture="isolation", draw=draw)]


def _beside_fewest(itl: dict[tuple[float, str], float], found: dict[tuple[float, str], tuple[_Kind, _Kind]]) -> str:
    """The same figures at the lowest rate of documents."""
    least = _DOCUMENTS[0]
    one, two = (found[least, name][0].ttft_p99 for name in ("one pool", "two pools"))
    return (
        f". Beside {least:.0f}/s ITL p99 is {itl[least, 'two pools']:.1f} ms against {itl[least, 'one pool']:.1f}, "
        f"TTFT p99 {two:.0f} against {one:.0f}"
    )


def _lending(bench: Bench) -> Row:
    """A burst of short requests while there are no documents."""
    requests = stream(LENGTHS["instruct"], bench.count(_BURST, 1000), 7)
    scenarios = {"kept apart": _TWO, "lent": _TWO.with_limits(pool_lend="shorter")}
    runs = {
        name: bench.run(one.with_limits(max_num_seqs=_SLOTS), requests, f"burst, {name}").figures
        for name, one in scenarios.items()
    }
    apart, lent = runs["kept apart"], runs["lent"]
    return Row(
        "an idle pool may be borrowed",
        f"a burst of {len(requests)} short requests: TTFT p99 {lent.ttft_p99:.0f} ms with the four idle workers of the "
        f"long pool lent, {apart.ttft_p99:.0f} without; {lent.tokens_per_s:.0f} against {apart.tokens_per_s:.0f} tok/s",
        f"{LENGTHS['instruct'].text}, all at once; the same mesh, {_SLOTS} sequences a worker",
        "the same pools without lending (--pool-lend '')",
        Holds.YES if lent.ttft_p99 < apart.ttft_p99 else Holds.NO,
        "a lender gives half of its batch and of its memory, and only while nothing of its own is there",
    )


def _is_short(request: Request) -> bool:
    return request.prompt_len < _LONG_FROM


def _kinds(one: Run) -> tuple[_Kind, _Kind]:
    """Of the short requests, and of the documents."""
    population, measured = one.measured.population, one.measured
    short = np.array([_is_short(request) for request in population.requests], bool)[population.request_of]
    served = np.isin(np.array(measured.reason, dtype=object), SERVED)

    def kind(mask: npt.NDArray[np.bool_]) -> _Kind:
        ttft = (population.first_ns - measured.arrived_ns)[mask]
        e2e = (population.last_ns - measured.arrived_ns)[mask]
        return _Kind(percentile(ttft, 0.5), percentile(ttft, 0.99), percentile(e2e, 0.5), percentile(e2e, 0.99))

    return kind(served & short), kind(served & ~short)
