"""``headrace simulate figures``: claims that the field makes, reproduced in the simulator or refuted there."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.output_file import check_folder
from headrace.simulate.figures import (
    batching,
    dynamic,
    interference,
    isolation,
    memory,
    placement,
    pressure,
    published,
    split,
)
from headrace.simulate.figures.claim import Bench, Section
from headrace.simulate.figures.document import as_text, write
from shared.config import ConfigError, Parser

SECTIONS: dict[str, Callable[[Bench], list[Section]]] = {
    "batching": batching.throughput,
    "ttft": batching.first_tokens,
    "paging": memory.paging,
    "block-size": memory.block_sizes,
    "capacity": memory.by_hand,
    "sharing": memory.sharing,
    "prefix": memory.prefixes,
    "chunks": interference.chunk_size,
    "cascade": pressure.cascade,
    "head-of-line": pressure.blocked_head,
    "watermark": pressure.watermark,
    "tenants": pressure.flood,
    "placement": placement.shared_prefixes,
    "isolation": isolation.isolation,
    "split": split.apart,
    "dynamic": dynamic.following,
    "published": published.published,
}

_QUICK = 0.1


def measured(bench: Bench, only: Sequence[str] = ()) -> list[Section]:
    return [section for name, made in SECTIONS.items() if not only or name in only for section in made(bench)]


def main(argv: Sequence[str] | None = None) -> int:
    made = Parser(
        prog="headrace simulate figures",
        description="Check the claims that the field makes about batching and memory: ours beside each, with workload, "
        "baseline, and whether it holds. Takes some twenty minutes on one core.",
    )
    made.add_argument("--quick", action="store_true", help="a tenth of the requests: rough figures in some two minutes")
    made.add_argument("--only", action="append", default=[], choices=sorted(SECTIONS), help="may be repeated")
    made.add_argument(
        "--write", type=Path, default=None, metavar="FOLDER", help="also write FOLDER/figures.md and pictures"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    args = made.parse_args(argv)
    if args.write is not None:
        try:
            check_folder(args.write, "--write")
        except ConfigError as error:
            made.error(str(error))
    began = time.monotonic()

    def say(name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{time.monotonic() - began:.0f} s: {name}", end="", file=sys.stderr, flush=True)

    sections = measured(Bench(_QUICK if args.quick else 1.0, say), args.only)
    say("done\n")
    rows = [row for section in sections for row in section.rows]
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else as_text(sections))
    if args.write is not None:
        write(sections, args.write)
    return 0
