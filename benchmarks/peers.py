"""Headrace and other engines, one after the other under the same load on this machine: one table, with ratios.

    python benchmarks/peers.py install all                # vllm, openvino, llamacpp, transformers; some 12 GB
    python benchmarks/peers.py                            # everything that is installed: an hour on two cores
    python benchmarks/peers.py --engines headrace,vllm --workloads chat1,chat16 --json figures.json
    python benchmarks/peers.py --seconds 30 --engines headrace -- --max-num-seqs 32

Each peer has a virtual environment of its own, made by ``install PEER ... [--venvs DIR]``; one that is missing is
named in the table as not installed. Run this with the Python that Headrace is installed in. Headrace runs as its own
whole mesh (``headrace up``: NATS, scheduler, worker and gateway as processes) and is asked over HTTP, as the peers that
have a server; OpenVINO and ``transformers`` run in their driver's process and pay for neither HTTP nor a client.

All get the same requests in the same order: token ids as prompts, greedy, ``ignore_eos``, so many output tokens as
asked, which is checked for each request. All have the same weights in bfloat16. The loop is closed: each user sends
the next request when the last answer has ended. Every load has prompts of its own, so no prefix cache knows them.

tok/s is output tokens a second at full load, from the first request to the moment when the last one is sent; ``--json``
has it of the whole run, too. TTFT is from sending, ITL between pieces of an answer. CPU-seconds are of all processes of
an engine (not the client's). A figure that other processes, or the hypervisor, disturbed by more than a tenth of a CPU
is named below the tables: such a machine gives ratios at best, and only when it is let alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The repository in place of this folder, where ``peers`` would be this very file.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.peers.cli import main

    sys.exit(main(sys.argv[1:], __doc__))
