"""A process that has pages, for tests of what crosses from one to another: prints its addresses, and serves until its
standard input ends."""

from __future__ import annotations

import json
import sys

from transfer_pair import End, host_pages

if __name__ == "__main__":
    source = End("a-process", host_pages(8), by=sys.argv[1])
    print(json.dumps(source.exchange.addresses), flush=True)
    sys.stdin.read()
