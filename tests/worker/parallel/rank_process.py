"""``rank_process.py RANK SIZE PORT FOLDER...``: one of the ranks that run divided models one after the other, with
nobody to lead them. Prints a JSON list: for each folder the greedy tokens, or why the model can't be divided.

What every rank samples must be the same, and is compared by the test.
"""

from __future__ import annotations

import json
import sys

from batch_driver import BatchDriver

from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker.parallel.ranks import Ranks, join, reach_store, serve_store
from worker.torch_runner import TorchRunner

PROMPTS = ([1 + index * 7 % 250 for index in range(37)], [3 + index * 5 % 250 for index in range(9)])
CHUNK = 16
MOST = 12


def greedy(folder: str) -> list[list[int]]:
    """The tokens after each of PROMPTS, run together in chunks."""
    driver = BatchDriver(TorchRunner.load(folder, dtype="float32", num_blocks=16, num_threads=1, self_check=False))
    sampling = Sampling(seed=1, max_tokens=MOST, temperature=0.0, ignore_eos=True)
    sequences = [driver.start(prompt, sampling) for prompt in PROMPTS]
    driver.run_to_end(CHUNK)
    return [sequence.tokens for sequence in sequences]


def main() -> None:
    rank, size, port = map(int, sys.argv[1:4])
    store = serve_store(size) if rank == 0 else reach_store(port, size)
    if rank == 0:
        print(store.port, flush=True)
    ranks = Ranks(rank, size, lambda count: count, invariant=True)
    join(ranks, store, "cpu")
    ranks.begin_steps()
    answers: list[object] = []
    for folder in sys.argv[4:]:
        try:
            answers.append(greedy(folder))
        except StartupError as error:
            answers.append(str(error))
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
