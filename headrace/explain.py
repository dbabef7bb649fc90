"""``headrace explain``: why a request took its time, asked of a running scheduler's internal listener."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from headrace.text_table import table
from observability.explanation import Interval
from observability.explanation_text import lines
from shared.config import Parser

TIMEOUT_S = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    made = Parser(
        prog="headrace explain",
        description="Why a request took its time: its life as a waterfall, each interval with its cause. The scheduler "
        "remembers the last requests and steps; no tracing back end is needed.",
    )
    made.add_argument(
        "request", nargs="?", default="",
        help="id of the request, of the answer (chatcmpl-...), or the X-Request-Id that the client sent",
    )  # fmt: skip
    made.add_argument("--slowest", type=int, default=0, metavar="N", help="list the N slowest requests instead")
    made.add_argument(
        "--scheduler", default="http://127.0.0.1:9401", metavar="URL", help="the scheduler's internal listener"
    )
    made.add_argument("--full", action="store_true", help="show each interval, however many; else they are folded")
    made.add_argument("--json", action="store_true", help="print JSON")
    args = made.parse_args(argv)
    if bool(args.request) == bool(args.slowest) or args.slowest < 0:
        made.error("give the id of a request, or --slowest N")
    path = f"/debug/requests/{urllib.parse.quote(args.request, safe='')}" if args.request else "/debug/requests"
    query = urllib.parse.urlencode({"format": "json"} | ({"slowest": args.slowest} if args.slowest else {}))
    found = _fetch(made, f"{args.scheduler.rstrip('/')}{path}?{query}", args.request)
    if args.json:
        print(json.dumps(found, indent=2))
    elif args.request:
        width = shutil.get_terminal_size((110, 24)).columns
        print("\n".join(lines(found, _intervals(found), found["slow_gaps"], width, args.full)))
        if found["siblings"]:
            print(
                f"\none of {len(found['siblings']) + 1} prompts in one call; the others: {' '.join(found['siblings'])}"
            )
    else:
        print(_listed(found))
    return 0


def _fetch(parser: Parser, url: str, request_id: str) -> Any:
    if not url.startswith(("http://", "https://")):
        parser.error(f"--scheduler: {url!r} is no http URL")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404 and request_id:
            try:
                why = json.load(error)["error"]
            except (ValueError, KeyError, TypeError):
                why = f"no request {request_id!r} is remembered"
            print(f"headrace explain: {why} (see --slowest)", file=sys.stderr)
            raise SystemExit(1) from None
        parser.error(f"{url}: {error}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        parser.error(f"no scheduler answers at {url}: {reason} (see --scheduler)")


def _intervals(found: dict[str, Any]) -> list[Interval]:
    begin = found["begin_unix_ns"]
    made = []
    for one in found["intervals"]:
        at = begin + round(one["at_ms"] * 1e6)
        words = (one["stage"], one["cause"], one["by"], one["note"])
        made.append(Interval(at, at + round(one["ms"] * 1e6), *words, one["steps"], one["tokens"], one["others"]))
    return made


def _listed(found: list[dict[str, Any]]) -> str:
    rows = [["took ms", "request", "prompt", "generated", "preempted", "end"]]
    rows += [
        [
            f"{one['took_ms']:,.1f}" if one["took_ms"] is not None else "-", one["request_id"],
            str(one["prompt_tokens"]), str(one["generated_tokens"]), str(one["preemptions"]), one["end"],
        ]
        for one in found
    ]  # fmt: skip
    return table(rows)
