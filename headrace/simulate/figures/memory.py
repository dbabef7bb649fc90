"""How much of the KV pool holds something: paged and contiguous, block sizes, capacity, sharing."""

from __future__ import annotations

from dataclasses import replace

from headrace.capacity import capacity
from headrace.simulate.figures.claim import Bench, Holds, Row, Section, contiguous
from headrace.simulate.measure import Sample
from headrace.simulate.scenario import Run, Scenario
from headrace.simulate.workload import LENGTHS, OWN, Lengths, Request, prefixed, stream

_PAPER_SLOTS = 15_700
_13B = Scenario(model="llama-2-13b", gpu="a100-40", max_model_len=2048, kv_tokens=_PAPER_SLOTS)
_WHERE_13B = "Llama-2-13B on one A100-40 with the vLLM paper's 15,700 KV slots"


def paging(bench: Bench) -> list[Section]:
    lengths = LENGTHS["chat"]
    requests = stream(lengths, bench.count(400, 150), 1)
    paged = bench.run(_13B, requests, "paged", 64).figures
    table = [["allocator", "wasted of held", "sequences at once", "tok/s"]]
    table.append(["pages of 16", f"{paged.kv_waste:.1%}", f"{paged.running_mean:.1f}", f"{paged.tokens_per_s:.0f}"])
    reserved = {}
    for longest in (1024 + 1024, 4096):
        one = reserved[longest] = bench.run(contiguous(_13B, longest), requests, f"contiguous {longest}", 64).figures
        table.append(
            [f"contiguous, {longest}", f"{one.kv_waste:.1%}", f"{one.running_mean:.1f}", f"{one.tokens_per_s:.0f}"]
        )
    low, high = reserved[2048].kv_waste, reserved[4096].kv_waste
    fits = paged.kv_waste < 0.04
    return [
        Section(
            "Paged KV cache",
            [
                Row(
                    "paged KV wastes < 4 %; contiguous reservation of the maximum length wastes 60-80 %",
                    f"pages of 16: {paged.kv_waste:.1%}; reserving 2,048 tokens: {low:.0%}, 4,096: {high:.0%}",
                    f"{lengths.text}; {_WHERE_13B}; closed loop of 64",
                    "the same continuous scheduler, each sequence reserving its maximum length in one piece",
                    Holds.YES if fits and low >= 0.6 else Holds.PARTLY if fits or low >= 0.6 else Holds.NO,
                    "waste is held entries that hold no token and are not of a prompt being computed. What reservation "
                    "wastes is 1 - mean length held / length reserved, so the maximum decides: above 80 % here",
                )
            ],
            table,
        )
    ]


def block_sizes(bench: Bench) -> list[Section]:
    lengths = LENGTHS["chat"]
    ample = Scenario(max_model_len=2048).with_limits(max_num_seqs=256)
    tight = replace(ample, kv_tokens=72_000)  # about what 256 of these sequences hold
    requests = stream(lengths, bench.count(1500, 1200), 1)
    table = [["block size", "slots wasted at 256 sequences", "tok/s, ample pool", "tok/s, pool of 72,000"]]
    wasted: dict[int, float] = {}
    speed: dict[int, float] = {}
    for size in (16, 32, 64, 128):
        wide = bench.run(replace(ample, block_size=size), requests, f"blocks of {size}", 512)
        full = [sample for sample in wide.measured.samples if sample.running >= 250]
        wasted[size] = _mean_waste(full)
        narrow = bench.run(replace(tight, block_size=size), requests, f"blocks of {size}, tight", 512).figures
        speed[size] = narrow.tokens_per_s
        table.append(
            [str(size), f"{wasted[size]:,.0f}", f"{wide.figures.tokens_per_s:.0f}", f"{narrow.tokens_per_s:.0f}"]
        )
    loss = 1 - speed[128] / speed[16]
    return [
        Section(
            "Block size",
            [
                Row(
                    "block size 128 at 256 sequences wastes about 16,000 token slots; 16 does not",
                    f"{wasted[128]:,.0f} slots with blocks of 128, {wasted[16]:,.0f} with 16; throughput "
                    f"with a pool that binds {abs(loss):.1%} {'lower' if loss > 0 else 'higher'} with 128",
                    f"{lengths.text}; Llama-3.1-8B on one A100-80; closed loop of 512, 256 in the batch; for "
                    "throughput a pool of 72,000 tokens",
                    "blocks of 128",
                    Holds.YES if 13_000 <= wasted[128] <= 19_000 and wasted[16] < 3_000 else Holds.PARTLY,
                    "half a block a sequence: 256 x 64 = 16,384",
                )
            ],
            table,
        )
    ]


def _mean_waste(samples: list[Sample]) -> float:
    gaps = [sample.slots_held - sample.slots_filled - sample.slots_awaited for sample in samples]
    return sum(gaps) / max(1, len(gaps))


def by_hand(bench: Bench) -> list[Section]:
    found = capacity(_13B.deployment, 16, [2048])
    counts = [row.sequences[2048] for row in found.assumptions]
    free = [row.kv_bytes / 1e9 for row in found.assumptions]
    table = [["assumption", "GB for KV", "sequences of 2048"]]
    table += [[row.text, f"{row.kv_bytes / 1e9:.1f}", f"{row.sequences[2048]:.1f}"] for row in found.assumptions]
    return [
        Section(
            "Capacity",
            [
                Row(
                    "Llama-13B on A100-40: about 26 GB weights, 14 GB KV, about 7 sequences of 2048 tokens",
                    f"{found.weight_bytes / 1e9:.1f} GB; {free[0]:.1f} GB left give {counts[0]:.1f}, the paper's "
                    f"{free[1]:.0f} GB {counts[1]:.1f}, 0.9 of the card less activations {counts[2]:.1f}",
                    "headrace capacity --model llama-2-13b --gpu a100-40",
                    "arithmetic",
                    Holds.YES,
                    "7 follows from 12 GB or from 0.9 of the card; 14 GB for KV would give 8.3, so the claim's own "
                    "figures do not agree with one another",
                )
            ],
            table,
        )
    ]


def sharing(bench: Bench) -> list[Section]:
    """n choices from one prompt: forked with copy-on-write, or as n requests of their own without prefix cache; and
    beam search, against as many sequences that share nothing."""
    table = [["search", "workload", "n", "KV pages per sequence saved", "requests/s shared", "apart", "ratio"]]
    saved: dict[str, list[float]] = {"sampling": [], "beam": []}
    ratios: dict[str, list[float]] = {"sampling": [], "beam": []}
    summary = Lengths("summary", "prompts of 1,000 tokens, outputs of 100", lambda _: (((OWN, 1000),), 100, 100))
    setting = _13B.with_limits(enable_prefix_caching=False)
    for search, n, lengths in [
        *(("sampling", n, lengths) for lengths in (LENGTHS["instruct"], LENGTHS["chat"], summary) for n in (2, 4, 6)),
        *(("beam", n, lengths) for lengths in (LENGTHS["instruct"], summary) for n in (2, 4, 6)),
    ]:
        at_once = 320 // n  # more than fit, on either side
        plain = stream(lengths, bench.count(800 // n, 320 // n) + at_once, 3, n=n)
        if search == "beam":
            limit = 160 if lengths is summary else 100  # a search takes its whole max_tokens; keep it short
            plain = [replace(one, outputs=(min(limit, max(one.outputs)),) * n) for one in plain]
            shared = [replace(one, beam_width=n, max_tokens=one.outputs[0], outputs=one.outputs[:1]) for one in plain]
        else:
            shared = plain
        apart = [replace(one, outputs=(output,)) for one in plain for output in one.outputs]
        name = f"{search} of {n}, {lengths.name}"
        with_cow = bench.run(setting, shared, f"{name}, shared", at_once)
        without = bench.run(setting, apart, f"{name}, apart", at_once * n)
        less = 1 - _pages_per_sequence(with_cow) / _pages_per_sequence(without)
        speed = (with_cow.figures.requests_per_s, without.figures.requests_per_s / n)
        saved[search].append(less)
        ratios[search].append(speed[0] / speed[1])
        table.append([
            search, lengths.name, str(n), f"{less:.0%}", f"{speed[0]:.2f}", f"{speed[1]:.2f}",
            f"{ratios[search][-1]:.2f}",
        ])  # fmt: skip

    def span(search: str) -> str:
        low, high = min(ratios[search]), max(ratios[search])
        return f"{max(saved[search]):.0%} fewer pages a sequence and {low:.1f}x to {high:.1f}x throughput"

    memory, most = max(*saved["sampling"], *saved["beam"]), max(*ratios["sampling"], *ratios["beam"])
    return [
        Section(
            "Copy-on-write",
            [
                Row(
                    "beam search and parallel sampling: up to 55 % less KV memory, up to 2.2x throughput with "
                    "copy-on-write",
                    f"beam search: up to {span('beam')}; parallel sampling: up to {span('sampling')}",
                    "Alpaca-like, ShareGPT-like (sampling), and prompts of 1,000 tokens with outputs of 100; n "
                    "of 2, 4, "
                    f"6; {_WHERE_13B}; more open requests than fit",
                    "each choice or beam a sequence of its own that shares nothing and computes its prompt itself, no "
                    "prefix cache on either side; in the beam baseline nothing is copied when beams are reordered",
                    Holds.YES if memory >= 0.5 and most >= 2 else Holds.PARTLY,
                    "sampling saves the prompt's share of a sequence; beams share most of their outputs too. "
                    "How likely "
                    "a beam's continuations are is an assumption of the simulator (headrace/simulate/beams.py). "
                    "A search "
                    "is planned on settled results, so a lone one waits for the bus at each step",
                )
            ],
            table,
        )
    ]


def _pages_per_sequence(one: Run) -> float:
    samples = [sample for sample in one.measured.samples if sample.running]
    return sum(sample.pages_used for sample in samples) / max(1, sum(sample.running for sample in samples))


def prefixes(bench: Bench) -> list[Section]:
    table = [["prefix", "own part", "output", "hits", "tok/s cached", "tok/s not", "ratio", "TTFT p50 cached", "not"]]
    ratios = []
    for prefix, own, output in ((500, 100, 200), (2000, 100, 100), (4000, 100, 50)):
        lengths = prefixed(8, prefix, own, output)
        requests: list[Request] = stream(lengths, bench.count(1500, 400), 4)
        setting = Scenario(max_model_len=8192)
        on = bench.run(setting, requests, f"prefix {prefix}, cached", 64).figures
        off = bench.run(setting.with_limits(enable_prefix_caching=False), requests, f"prefix {prefix}, not", 64).figures
        ratios.append(on.tokens_per_s / off.tokens_per_s)
        table.append([
            str(prefix), str(own), str(output), f"{on.prefix_hit_share:.0%}", f"{on.tokens_per_s:.0f}",
            f"{off.tokens_per_s:.0f}", f"{ratios[-1]:.1f}", f"{on.ttft_p50:.0f}", f"{off.ttft_p50:.0f}",
        ])  # fmt: skip
    return [
        Section(
            "Prefix cache",
            [
                Row(
                    "shared prefixes: up to 5x with the prefix cache",
                    ", ".join(f"{ratio:.1f}x" for ratio in ratios) + " with prefixes of 500, 2,000, 4,000 tokens",
                    "8 shared prefixes, own part around 100, outputs around 200, 100, 50; Llama-3.1-8B on one A100-80; "
                    "closed loop of 64",
                    "the same without prefix cache",
                    Holds.YES if max(ratios) >= 5 else Holds.PARTLY,
                    "the ratio is set by the workload: shared prompt work over all work",
                )
            ],
            table,
        )
    ]
