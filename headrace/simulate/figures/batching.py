"""Continuous against static and dynamic batching: throughput, time to first token, useful slots, unequal and equal
outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace.simulate.figures.claim import Bench, Holds, Row, Section
from headrace.simulate.scenario import Scenario
from headrace.simulate.workload import LENGTHS, stream, uniform

_SETTING = Scenario(model="llama-3.1-8b", gpu="a100-80", max_model_len=2048)
_POLICIES = ("static", "dynamic", "continuous")
_WHERE = "Llama-3.1-8B on one A100-80"
_STATIC = "static: a batch of the same size, prompts left-padded, held until its longest member ends"


def throughput(bench: Bench) -> list[Section]:
    """Equal settings: same batch size, budget, pool; the pool never binds. A closed loop, so the queue is never dry."""
    rows, table = [], [["batch", "workload", *(f"{policy} tok/s" for policy in _POLICIES), "continuous : static",
                        "useful slots, static", "continuous", "busy share, static", "continuous"]]  # fmt: skip
    ratios: dict[tuple[str, int], float] = {}
    shares: dict[str, tuple[float, float]] = {}
    drawn = []
    for lengths in (LENGTHS["mixed"], uniform(128, 128)):
        for batch in (16, 64, 256):
            requests = stream(lengths, bench.count(2000 if batch < 256 else 4000, 6 * batch), 1)
            runs = {}
            for policy in _POLICIES:
                scenario = replace(_SETTING, policy=policy).with_limits(max_num_seqs=batch)
                runs[policy] = bench.run(scenario, requests, f"{lengths.name}, {batch}, {policy}", 2 * batch)
            figures = {policy: one.figures for policy, one in runs.items()}
            ratio = figures["continuous"].tokens_per_s / figures["static"].tokens_per_s
            ratios[lengths.name, batch] = ratio
            if lengths.name == "mixed" and batch == 64:
                shares = {name: (one.useful_slot_share, one.busy_share) for name, one in figures.items()}
                drawn = [(policy, one.measured) for policy, one in runs.items()]
            table.append([
                str(batch), lengths.name, *(f"{figures[policy].tokens_per_s:.0f}" for policy in _POLICIES),
                f"{ratio:.1f}", f"{figures['static'].useful_slot_share:.0%}",
                f"{figures['continuous'].useful_slot_share:.0%}", f"{figures['static'].busy_share:.0%}",
                f"{figures['continuous'].busy_share:.0%}",
            ])  # fmt: skip
    mixed = [ratios["mixed", batch] for batch in (16, 64, 256)]
    equal = [ratios["uniform", batch] for batch in (16, 64, 256)]
    inside = [4 <= ratio <= 8 for ratio in mixed]
    rows.append(
        Row(
            "continuous against static batching: 4-8x on mixed chat (outputs 5-1000)",
            f"{mixed[0]:.1f}x, {mixed[1]:.1f}x, {mixed[2]:.1f}x at batches of 16, 64, 256",
            f"mixed chat, outputs 5-1000 around 90; {_WHERE}; closed loop, 2 requests open per slot",
            _STATIC + "; the pool never binds",
            Holds.YES if all(inside) else Holds.PARTLY if any(inside) or min(mixed) >= 4 else Holds.NO,
            "the ratio is longest output over mean output inside a batch, less what a fuller batch costs: it grows "
            "with the batch, and at 256 static already computes ten rows for each wanted one",
        )
    )
    rows.append(
        Row(
            "about 1x when every output is equal",
            f"{equal[0]:.2f}x, {equal[1]:.2f}x, {equal[2]:.2f}x at batches of 16, 64, 256",
            f"prompts and outputs of 128 tokens each; {_WHERE}; closed loop",
            _STATIC,
            Holds.YES if all(0.85 <= ratio <= 1.25 for ratio in equal) else Holds.PARTLY,
            "beside the batch, the two differ in how prompts are computed: apart from decodes (static) or with them",
        )
    )
    static, continuous = shares["static"], shares["continuous"]
    rows.append(
        Row(
            "GPU busy share 30-60 % with static batching, 80-95 % with continuous",
            f"slots that yield a wanted token: {static[0]:.0%} static, {continuous[0]:.0%} continuous; busy share "
            f"{static[1]:.0%} and {continuous[1]:.0%}",
            f"mixed chat at a batch of 64; {_WHERE}; closed loop",
            _STATIC,
            Holds.PARTLY if continuous[0] >= 0.8 else Holds.NO,
            "the device is busy all the time under both, since padding is computed too: what differs is how much of "
            "the work is wanted, and static wastes more than the claim says on outputs as uneven as these",
        )
    )
    section = Section("Continuous batching", rows, table, picture="batching")

    def draw(path: Path) -> None:
        from headrace.simulate.picture import draw_runs

        draw_runs(drawn, path)

    section.draw = draw
    return [section]


def first_tokens(bench: Bench) -> list[Section]:
    """Time to first token at a very low rate, at 1/s, and at half of what static batching can take."""
    lengths, batch = LENGTHS["mixed"], 64
    setting = _SETTING.with_limits(max_num_seqs=batch)
    static = bench.run(
        replace(setting, policy="static"), stream(lengths, bench.count(1000, 400), 1), "capacity of static", 2 * batch
    )
    half = static.figures.requests_per_s / 2
    table = [["rate /s", "policy", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "e2e p50 ms", "tok/s"]]
    ttft: dict[tuple[str, str], float] = {}
    e2e: dict[tuple[str, str], float] = {}
    for label, rate in (("0.05", 0.05), ("1", 1.0), ("half", half)):
        for policy in _POLICIES:
            requests = stream(lengths, bench.count(400, 100), 2, rate)
            one = bench.run(replace(setting, policy=policy), requests, f"{rate:.2f}/s, {policy}").figures
            ttft[label, policy], e2e[label, policy] = one.ttft_p50, one.e2e_p50
            table.append([
                f"{rate:.2f}", policy, f"{one.ttft_p50:.0f}", f"{one.ttft_p99:.0f}", f"{one.itl_p50:.1f}",
                f"{one.e2e_p50:.0f}", f"{one.tokens_per_s:.0f}",
            ])  # fmt: skip
    alike = (
        e2e["0.05", "static"] <= 1.1 * e2e["0.05", "continuous"] and e2e["1", "static"] <= 1.1 * e2e["1", "continuous"]
    )
    where = f"mixed chat, Poisson; {_WHERE}, batch 64"
    return [
        Section(
            "Time to first token",
            [
                Row(
                    "at very low request rates all policies perform alike",
                    f"p50 TTFT at 0.05/s: static {ttft['0.05', 'static']:.0f}, dynamic {ttft['0.05', 'dynamic']:.0f}, "
                    f"continuous {ttft['0.05', 'continuous']:.0f} ms; at 1/s {ttft['1', 'static']:.0f}, "
                    f"{ttft['1', 'dynamic']:.0f}, {ttft['1', 'continuous']:.0f} ms",
                    where,
                    _STATIC + "; dynamic waits up to 50 ms for a fuller batch",
                    Holds.YES if alike else Holds.PARTLY,
                    "alike while requests do not meet. At 1/s an answer takes longer than the next request is away: "
                    "with static batching that one waits for the end of the running batch",
                ),
                Row(
                    "at moderate load continuous admits at once and lowers TTFT",
                    f"p50 TTFT at {half:.1f}/s (half of static's capacity): static {ttft['half', 'static']:.0f}, "
                    f"dynamic {ttft['half', 'dynamic']:.0f}, continuous {ttft['half', 'continuous']:.0f} ms",
                    where,
                    "the same; half of continuous batching's own capacity would be beyond what static can take",
                    Holds.YES if ttft["half", "continuous"] * 2 < ttft["half", "static"] else Holds.NO,
                ),
            ],
            table,
        )
    ]
