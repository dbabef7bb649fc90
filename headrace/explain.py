"""``headrace explain``: why a request took its time, asked of a running scheduler's internal listener."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from headrace.settings import DEFAULT_SCHEDULER, SCHEDULER_ENV
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
    made.add_argument(
        "--slowest", type=int, nargs="?", const=10, default=None, metavar="N",
        help="list the N slowest requests instead (10 without a number)",
    )  # fmt: skip
    made.add_argument(
        "--scheduler", default=os.environ.get(SCHEDULER_ENV) or DEFAULT_SCHEDULER, metavar="URL[,URL...]",
        help="the scheduler's internal listener; of several, the one that leads is asked, then those that stand by "
        f"(default: ${SCHEDULER_ENV}, or {DEFAULT_SCHEDULER})",
    )  # fmt: skip
    made.add_argument("--full", action="store_true", help="show each interval, however many; else they are folded")
    made.add_argument("--json", action="store_true", help="print JSON")
    args = made.parse_args(argv)
    if args.request and args.slowest is not None:
        made.error("give the id of a request or --slowest N, not both")
    if args.slowest is not None and args.slowest < 1:
        made.error("--slowest: N is at least 1")
    if not args.request and args.slowest is None:
        made.error("give the id of a request, or --slowest N")
    bases = [one.strip().rstrip("/") for one in args.scheduler.split(",") if one.strip()]
    for base in bases or [args.scheduler]:
        if not base.startswith(("http://", "https://")):
            made.error(f"--scheduler: {base!r} is no http URL")
    path = f"/debug/requests/{urllib.parse.quote(args.request, safe='')}" if args.request else "/debug/requests"
    query = urllib.parse.urlencode({"format": "json"} | ({"slowest": args.slowest} if args.slowest else {}))
    found = _asked(made, bases, f"{path}?{query}", args.request)
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


class _NoAnswer(Exception):
    """One line that says why a scheduler's listener does not answer as one."""


class _Unknown(Exception):
    """The scheduler does not know the request; it says what that may mean."""


def _asked(parser: Parser, bases: Sequence[str], path: str, request_id: str) -> Any:
    """What a scheduler at one of ``bases`` says: the one that leads if it knows the request, else another one."""
    there: list[tuple[bool, str, str]] = []
    troubles: list[str] = []
    for base in bases:
        try:
            leads, who = _who(base)
        except _NoAnswer as error:
            troubles.append(str(error))
        else:
            there.append((not leads, base, who))
    if not there:
        parser.error(troubles[0])
    unknown = ""
    for _, base, who in sorted(there, key=lambda one: one[0]):
        try:
            found = _fetch(f"{base}{path}")
        except _NoAnswer as error:
            parser.error(str(error))
        except _Unknown as error:
            unknown = unknown or str(error) or f"no request {request_id!r} is known"
        else:
            print(f"headrace explain: {who}", file=sys.stderr)
            return found
    print(f"headrace explain: {', '.join(who for *_, who in there)}", file=sys.stderr)
    print(f"headrace explain: {unknown} (see --slowest)", file=sys.stderr)
    raise SystemExit(1)


def _who(base: str) -> tuple[bool, str]:
    """Whether a scheduler leads, and which one it is: several meshes may run on one machine."""
    try:
        about = _fetch(f"{base}/debug/scheduler")
    except _Unknown:
        about = None
    if not isinstance(about, dict) or not {"scheduler", "mesh"} <= about.keys():
        raise _NoAnswer(f"no scheduler, but something else answers at {base} (see --scheduler)")
    return bool(about.get("leads")), f"scheduler {about['scheduler']} of mesh {about['mesh']} at {base}"


def _fetch(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            body = error.read()
        if error.code == 404:
            try:
                why = str(json.loads(body)["error"])
            except (ValueError, KeyError, TypeError):
                why = ""
            raise _Unknown(why) from None
        if error.code < 500:
            raise _NoAnswer(f"no scheduler, but something else answers at {url}: {error} (see --scheduler)") from None
        raise _NoAnswer(f"{url}: {error}") from None
    except (http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise _NoAnswer(f"no scheduler answers at {url}: {reason} (see --scheduler)") from None


def _intervals(found: dict[str, Any]) -> list[Interval]:
    begin = found["begin_unix_ns"]
    made = []
    for one in found["intervals"]:
        at = begin + round(one["at_ms"] * 1e6)
        words = (one["stage"], one["cause"], one["by"], one["note"])
        made.append(Interval(at, at + round(one["ms"] * 1e6), *words, one["steps"], one["tokens"], one["others"]))
    return made


def _listed(found: list[dict[str, Any]]) -> str:
    rows = [["took ms", "request", "client's id", "prompt", "generated", "preempted", "end"]]
    rows += [
        [
            f"{one['took_ms']:,.1f}" if one["took_ms"] is not None else "-", one["request_id"], one["client_id"] or "-",
            str(one["prompt_tokens"]), str(one["generated_tokens"]), str(one["preemptions"]), one["end"],
        ]
        for one in found
    ]  # fmt: skip
    return table(rows)
