"""What a worker knows of its pages' content, for a scheduler that starts over."""

from __future__ import annotations

import queue

import pytest

from shared.messages import Capacity, Reset, Sampling, SlotStart, StepPlan, pack_tokens, unpack_tokens
from shared.page_hash import DIGEST_BYTES
from worker.batch import Batch, Sampled, Step
from worker.page_book import PageBook
from worker.simulated import SimulatedRunner, StepTime
from worker.step_loop import Executed, StepLoop


def digest(number: int) -> bytes:
    return bytes([number]) * DIGEST_BYTES


def plan(step: int = 1, **fields: object) -> StepPlan:
    return StepPlan(1, "w", 1, step, **fields)  # type: ignore[arg-type]


def start(pages: list[int], computed: int = 0, tokens: int = 12) -> SlotStart:
    prompt = pack_tokens(range(tokens))
    return SlotStart(0, "r", 1, 0, "g", prompt, tokens, pages, Sampling(1, 4), computed=computed)


def known(book: PageBook) -> list[tuple[int, bytes]]:
    pages, hashes = book.packed(1 << 20)
    return [
        (page, hashes[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
        for place, page in enumerate(unpack_tokens(pages))
    ]


def filled(*pages: int) -> PageBook:
    book = PageBook(4, 40)
    for page in pages:
        book.end(plan(hashes=[(page, digest(page))]))
    return book


@pytest.mark.parametrize(
    ("gives", "left"),
    [
        (plan(starts=[start([1, 2, 3])]), []),
        (plan(pages=[(5, [2]), (6, [1])]), [3]),
        (plan(copies=[(1, 2)], replaces=[(0, 1, 2)]), [1, 3]),
        (plan(replaces=[(0, 1, 2)]), [1, 3]),
        (plan(swap_ins=[(0, 3)], swap_outs=[(1, 0)]), [1, 2]),
        (plan(decodes=[0], chunks=[(1, 4)], drops=[3]), [1, 2, 3]),
    ],
)
def test_a_page_leaves_the_book_when_it_is_given_to_somebody(gives: StepPlan, left: list[int]) -> None:
    book = filled(1, 2, 3)
    book.begin(gives)
    assert [page for page, _ in known(book)] == left


def test_the_computed_prefix_of_a_start_stays_and_counts_as_used() -> None:
    book = filled(1, 2, 3, 4)
    book.begin(plan(starts=[start([1, 2, 9], computed=8)]))
    assert [page for page, _ in known(book)] == [3, 4, 2, 1]
    book.begin(plan(starts=[start([3, 4], computed=6)]))  # a fork whose last page is not whole
    assert [page for page, _ in known(book)] == [2, 1, 3]


def test_what_does_not_fit_in_a_message_is_the_oldest() -> None:
    book = filled(1, 2, 3)
    book.end(plan(hashes=[(1, digest(7))]))
    assert known(book) == [(2, digest(2)), (3, digest(3)), (1, digest(7))]
    pages, hashes = book.packed(2 * (4 + DIGEST_BYTES) + 3)
    assert unpack_tokens(pages) == [3, 1] and hashes == digest(3) + digest(7)
    assert book.packed(0) == (b"", b"")


def test_pages_that_the_worker_does_not_have_and_hashes_that_are_none_are_left_out() -> None:
    book = PageBook(4, 40)
    book.end(plan(hashes=[(0, digest(1)), (41, digest(1)), (3, b"short"), (2**40, digest(1)), (4, digest(4))]))
    assert known(book) == [(4, digest(4))]


class Breaking(SimulatedRunner):
    """Fails as often as told."""

    faults = 0

    def forward(self, batch: Batch, step: Step) -> Sampled:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("out of memory")
        return super().forward(batch, step)


def test_a_reset_is_answered_after_what_runs_and_only_with_what_is_sure() -> None:
    runner = Breaking(Capacity("m", 64, 4, 40, 997, [5]), StepTime())
    told: queue.SimpleQueue[Executed | tuple[Reset, list[tuple[int, bytes]]]] = queue.SimpleQueue()
    loop = StepLoop(
        runner, Batch(4, 40, 64, frozenset({5})), lambda _: True, told.put,
        lambda reset, book: told.put((reset, known(book))),
    )  # fmt: skip
    loop.start()
    loop.put(plan(1, starts=[start([1, 2, 3])], chunks=[(0, 8)], hashes=[(1, digest(1)), (2, digest(2))]))
    first = Reset(1, "w", 1, 2)
    loop.reset(first)
    assert isinstance(told.get(timeout=60), Executed)
    assert told.get(timeout=60) == (first, [(2, digest(2)), (1, digest(1))]), "the leaf is the older one"

    runner.faults = 1
    loop.put(plan(2, starts=[start([2, 7, 8])], chunks=[(0, 8)], hashes=[(2, digest(3)), (7, digest(4))]))
    loop.put(plan(3, chunks=[(0, 4)], pages=[(0, [1])], hashes=[(8, digest(5))]))  # does not run any more
    second = Reset(1, "w", 1, 4)
    loop.reset(second)
    failed, skipped = told.get(timeout=60), told.get(timeout=60)
    assert isinstance(failed, Executed) and failed.fault and not failed.skipped
    assert isinstance(skipped, Executed) and skipped.skipped
    assert told.get(timeout=60) == (second, [(1, digest(1))])
    loop.stop()
