"""What happens when memory runs out: eviction cascades, a blocked head, the watermark, a tenant that floods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.simulate.figures.claim import (
    Bench,
    Holds,
    Row,
    Section,
    first_chunk,
    vllm_v0,
)
from headrace.simulate.figures.tenants import beside_blocked_documents, most_ahead
from headrace.simulate.measure import Measurements
from headrace.simulate.report import SERVED, Figures, percentile
from headrace.simulate.scenario import Run, Scenario
from headrace.simulate.workload import LENGTHS, merged, stream

_RAG = Scenario(gpu="a100-40", max_model_len=32_768)
_DOCUMENT = 4000  # tokens; the shortest document of the workload
_RAG_TEXT = (
    "chat, and every tenth request a document of 4k to 30k tokens; Poisson; Llama-3.1-8B on one A100-40 "
    "(160,000 KV slots)"
)


def cascade(bench: Bench) -> list[Section]:
    """Offered load against goodput and latency, for our scheduler and two naive ones."""
    seconds = bench.seconds(200, 60)
    variants: list[tuple[str, Callable[[Scenario], Scenario]]] = [
        ("ours", lambda scenario: scenario), ("vLLM v0 rules", vllm_v0), ("first chunk", first_chunk),
    ]  # fmt: skip
    rates = (2.0, 4.0, 5.0, 7.0, 15.0)
    found: dict[str, list[Run]] = {name: [] for name, _ in variants}
    table = [["offered /s", "scheduler", "new tok/s", "e2e p50 s", "e2e p99 s", "ITL p99 ms", "preemptions",
              "recomputed tok/s", "busy share", "documents served"]]  # fmt: skip
    for rate in rates:
        requests = stream(LENGTHS["rag"], int(rate * seconds), 1, rate, longest=32_768)
        for name, change in variants:
            one = bench.run(change(_RAG), requests, f"{name} at {rate:g}/s", until_s=seconds)
            found[name].append(one)
            shown = one.figures
            table.append([
                f"{rate:g}", name, f"{shown.tokens_per_s:.0f}", f"{shown.e2e_p50 / 1e3:.1f}",
                f"{shown.e2e_p99 / 1e3:.1f}", f"{shown.itl_p99:.0f}", str(shown.preemptions),
                f"{shown.recomputed_tokens / seconds:.0f}", f"{shown.busy_share:.0%}",
                str(_documents_served(one.measured)),
            ])  # fmt: skip
    good = {name: [one.figures.tokens_per_s for one in runs] for name, runs in found.items()}
    kept = {name: series[-1] / max(series) for name, series in good.items()}
    naive = found["first chunk"]
    worst = min(range(len(rates)), key=lambda index: good["first chunk"][index] / good["ours"][index])
    signature = naive[worst].figures
    row = Row(
        "eviction cascade: with naive preemption goodput collapses as long contexts arrive; ours does not",
        f"at three times saturation: ours keeps {kept['ours']:.0%} of its best new tokens a second, first-chunk "
        "admission "
        f"{kept['first chunk']:.0%}, vLLM v0's rules {kept['vLLM v0 rules']:.0%}. At {rates[worst]:g}/s "
        "first-chunk gives "
        f"{good['first chunk'][worst]:.0f} tok/s against {good['ours'][worst]:.0f}; its P99 latency is "
        f"{signature.e2e_p99 / 1e3:.0f} s, ours {found['ours'][worst].figures.e2e_p99 / 1e3:.0f} s",
        _RAG_TEXT + f", {seconds:.0f} s of arrivals at each rate",
        "first chunk: admit once a first chunk fits, evict the youngest, requeue in front, recompute all. vLLM v0: the "
        "same, but admit once the whole prompt fits, watermark 1 %",
        Holds.YES if kept["ours"] >= 0.95 and good["first chunk"][worst] <= 0.7 * good["ours"][worst] else Holds.PARTLY,
        f"the signature: {signature.preemptions} preemptions, {signature.recomputed_tokens / seconds:.0f} "
        "tokens recomputed "
        f"a second, new tokens at {good['first chunk'][worst]:.0f}/s, busy share {signature.busy_share:.0%}. "
        "What collapses "
        "is admission whose check is not held; whole-prompt admission in strict order already prevents most of "
        "it. Beyond "
        "saturation ours gains on strict order by letting short requests pass blocked documents",
    )

    def draw(path: Path) -> None:
        from headrace.simulate.picture import curves

        xs = list(rates)
        curves(
            path, "offered requests / s",
            panels={
                "new tokens / s": {name: (xs, good[name]) for name in found},
                "P99 latency, s": {
                    name: (xs, [one.figures.e2e_p99 / 1e3 for one in runs]) for name, runs in found.items()
                },
                "recomputed tokens / s": {
                    name: (xs, [one.figures.recomputed_tokens / seconds for one in runs])
                    for name, runs in found.items()
                },
            },
        )  # fmt: skip

    return [Section("Eviction cascade", [row], table, picture="cascade", draw=draw)]


def blocked_head(bench: Bench) -> list[Section]:
    """Strict order against backfilling, a little beyond saturation, on the workload of the cascade."""
    seconds, rate = bench.seconds(300, 30), 6.0
    requests = stream(LENGTHS["rag"], int(rate * seconds), 8, rate, longest=32_768)
    variants = {
        "strict FIFO": _RAG.with_limits(max_bypasses=0),
        "backfilling": _RAG,
        "unbounded skipping": _RAG.with_limits(max_bypasses=1 << 30, max_bypass_wait_ns=1 << 60),
    }
    table = [["order", "pages in use", "batch", "requests/s", "short p50 wait s", "short p99 wait s",
              "documents served", "long p99 wait s", "head's worst wait s", "bypasses", "SLO met"]]  # fmt: skip
    runs = {name: bench.run(one, requests, name, until_s=seconds) for name, one in variants.items()}
    waits = {name: _waits(one.measured) for name, one in runs.items()}
    heads = {name: one.core.counters.worst_head_wait_ns / 1e9 for name, one in runs.items()}
    for name, one in runs.items():
        short, long = waits[name]
        table.append([
            name, f"{one.figures.kv_usage:.0%}", f"{one.figures.running_mean:.0f}",
            f"{one.figures.requests_per_s:.2f}", f"{short[0] / 1e3:.1f}", f"{short[1] / 1e3:.1f}",
            str(_documents_served(one.measured)), f"{long[1] / 1e3:.1f}", f"{heads[name]:.1f}",
            str(one.core.counters.bypasses), f"{one.figures.slo_share:.0%}",
        ])  # fmt: skip
    strict, filled = runs["strict FIFO"], runs["backfilling"]
    wait = {name: one[0][1] / 1e3 for name, one in waits.items()}
    bounded = heads["backfilling"] <= heads["strict FIFO"] + _RAG.limits.max_bypass_wait_ns / 1e9 + 1
    more = filled.figures.requests_per_s / strict.figures.requests_per_s
    row = Row(
        "memory head-of-line blocking: strict FIFO stalls; backfilling keeps the pool busy, and the head's wait stays "
        "bounded",
        f"short requests' p99 wait {wait['strict FIFO']:.1f} s in strict order, {wait['backfilling']:.1f} s with "
        f"backfilling; {more - 1:+.0%} requests a second, {_documents_served(filled.measured)} documents served "
        "instead of "
        f"{_documents_served(strict.measured)}; pages in use {strict.figures.kv_usage:.0%} and "
        f"{filled.figures.kv_usage:.0%}; the blocked head's worst wait {heads['strict FIFO']:.1f} s and "
        f"{heads['backfilling']:.1f} s",
        f"{_RAG_TEXT} at {rate:g}/s, {seconds:.0f} s",
        "the same core in strict order (max_bypasses 0)",
        Holds.YES if wait["strict FIFO"] >= 1.5 * wait["backfilling"] and more > 1.05 and bounded else Holds.PARTLY,
        "what is left of the pool is held for the growth that is expected of those who run; short requests fill "
        "the batch "
        "more than the pool. A head counts as blocked from when it first fails to fit; the bound is "
        "max_bypass_wait (5 s) "
        "or 32 bypasses, and then a reservation that lasts until enough of those who run have ended, at the latest by "
        "their max_tokens",
    )

    def draw(path: Path) -> None:
        from headrace.simulate.picture import draw_runs

        draw_runs([(name, runs[name].measured) for name in ("strict FIFO", "backfilling")], path)

    return [Section("A blocked head", [row], table, picture="head_of_line", draw=draw)]


def _documents_served(measured: Measurements) -> int:
    lengths = [request.prompt_len for request in measured.population.requests]
    ends = zip(lengths, measured.reason, strict=True)
    return sum(length >= _DOCUMENT and reason in SERVED for length, reason in ends)


def _waits(measured: Measurements) -> tuple[tuple[float, float], tuple[float, float]]:
    """(p50, p99) in ms of short and of long requests' waits for admission."""
    lengths = [request.prompt_len for request in measured.population.requests]
    found = []
    for wanted in (False, True):
        chosen = [index for index, length in enumerate(lengths) if (length >= _DOCUMENT) is wanted]
        waited = (measured.admitted_ns - measured.arrived_ns)[chosen]
        waited = waited[measured.admitted_ns[chosen] >= 0]
        found.append((percentile(waited, 0.5), percentile(waited, 0.99)))
    return found[0], found[1]


def watermark(bench: Bench) -> list[Section]:
    """vLLM pull request 44594: a saturated 1000/5000 load, the watermark as the only change."""
    setting = Scenario(model="qwen2.5-7b", gpu="a100-80", max_model_len=8192, kv_tokens=120_000)
    setting = setting.with_limits(max_num_seqs=256)
    requests = stream(LENGTHS["saturated"], bench.count(240, 120), 9)
    table = [
        [
            "scheduler",
            "watermark",
            "preemptions",
            "recomputed tokens",
            "tok/s",
            "ITL p50 ms",
            "ITL p99 ms",
            "TTFT p50 s",
        ]
    ]
    found: dict[tuple[str, float], Figures] = {}
    foreseeing = {True: "ours", False: "ours, growth not foreseen"}
    cases = [("vLLM v0 rules", mark, vllm_v0(setting)) for mark in (0.0, 0.02, 0.05)]
    cases += [
        (foreseeing[grows], mark, setting.with_limits(growth_aware_admission=grows))
        for grows in (False, True)
        for mark in (0.0, 0.05)
    ]
    for name, mark, scenario in cases:
        marked = scenario.with_limits(admission_watermark=mark)
        one = bench.run(marked, requests, f"{name}, watermark {mark:g}", 60).figures
        found[name, mark] = one
        table.append([
            name, f"{mark:.0%}", str(one.preemptions), str(one.recomputed_tokens), f"{one.tokens_per_s:.0f}",
            f"{one.itl_p50:.1f}", f"{one.itl_p99:.1f}", f"{one.ttft_p50 / 1e3:.1f}",
        ])  # fmt: skip
    before, after = found["vLLM v0 rules", 0.0], found["vLLM v0 rules", 0.05]
    ours = found["ours", 0.05]
    fewer = before.preemptions / max(1, after.preemptions)
    row = Row(
        "watermark 0 to 5 % on a saturated 1000/5000 workload: far fewer preemptions (1065 to 187), lower p99 "
        "ITL (40.6 to "
        "17.7 ms), slightly more throughput (+5 %)",
        f"vLLM v0's rules: {before.preemptions} to {after.preemptions} preemptions, p99 ITL {before.itl_p99:.1f} to "
        f"{after.itl_p99:.1f} ms, throughput {after.tokens_per_s / before.tokens_per_s - 1:+.1%}; ours at 5 %: "
        f"{ours.preemptions} preemptions, p99 ITL {ours.itl_p99:.1f} ms, "
        f"{ours.tokens_per_s / before.tokens_per_s - 1:+.1%}",
        f"{LENGTHS['saturated'].text}; Qwen2.5-7B on one A100-80 with a pool of 120,000 tokens; closed loop of 60",
        "the same scheduler with no watermark",
        Holds.YES
        if fewer >= 2 and after.itl_p99 <= before.itl_p99 and after.tokens_per_s >= before.tokens_per_s
        else Holds.PARTLY
        if fewer >= 1.5
        else Holds.NO,
        "the direction is the claim's; its figures are of another card and a load of its own",
    )
    return [Section("Watermark", [row], table)]


def flood(bench: Bench) -> list[Section]:
    """Two tenants of equal weight that both always wait: one sends four times what the other does; documents block."""
    seconds = bench.seconds(120, 40)
    pool = 60_000
    scenario = Scenario(max_model_len=2048, kv_tokens=pool).with_limits(max_num_seqs=64)
    requests = merged(
        stream(LENGTHS["mixed"], int(120 * seconds), 10, 120.0, tenant="flood"),
        stream(LENGTHS["mixed"], int(30 * seconds), 11, 30.0, tenant="calm"),
    )
    one = bench.run(scenario, requests, "flood", until_s=seconds)
    place = {tenant: index for index, tenant in enumerate(one.measured.tenants)}
    samples = [sample for sample in one.measured.samples if sample.at_s > 10]  # both wait from here on
    ahead = [sample.tenant_service[place["flood"]] - sample.tenant_service[place["calm"]] for sample in samples]
    apart = max(ahead) - min(ahead)
    first, last = samples[0].tenant_service, samples[-1].tenant_service
    served = {tenant: last[index] - first[index] for tenant, index in place.items()}
    share = served["flood"] / sum(served.values())
    greatest = max(one.prompt_len for one in requests), max(one.max_tokens for one in requests)
    bound = 2 * most_ahead(scenario.limits, *greatest)
    bypasses = one.core.counters.bypasses
    row = Row(
        "a tenant that floods gets its share and no more",
        f"the flooding tenant gets {share:.1%} of the service; between any two times the tenants' service "
        "differs by at "
        f"most {apart:,} tokens, the bound is {bound:,.0f}",
        f"two tenants of equal weight, mixed chat at 120/s and 30/s, {seconds:.0f} s; Llama-3.1-8B on one "
        "A100-80, batch "
        f"64, a pool of {pool:,} tokens",
        "first in first out: shares follow arrivals, 80 % and 20 %",
        Holds.YES if abs(share - 0.5) <= 0.03 and apart <= bound else Holds.NO,
        "service is prompt tokens + 2 x output tokens; the bound is that of docs/architecture.md, Bounds. Nothing "
        f"blocks here ({bypasses} admissions passed a head)",
    )
    spent = samples[-1].at_s - samples[0].at_s
    each = [f"{tenant} {count / spent:.0f}/s" for tenant, count in served.items()]
    rows, table = beside_blocked_documents(bench)
    return [Section("Tenants", [row, *rows], table, note=f"Service in the first row: {', '.join(each)}.")]
