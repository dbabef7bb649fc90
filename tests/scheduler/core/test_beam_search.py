"""Beam search in the core: pages are shared, beams reordered by bookkeeping, and the result is the search's own."""

from __future__ import annotations

import pytest
from mesh_in_a_box import Box, request, searched

from scheduler.core.beams import BeamSearch
from scheduler.core.events import Failed, Found
from scheduler.core.limits import Limits
from shared.messages import Outcome, Sampling


def limits(**more: int) -> Limits:
    return Limits(**{"max_num_seqs": 8, "max_num_batched_tokens": 64} | more)


def found(box: Box) -> dict[str, Found]:
    return {event.submit.request_id: event for event in box.events if isinstance(event, Found)}


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_result_is_that_of_the_search_alone(prompt_len: int, width: int) -> None:
    box = Box(limits(), num_blocks=60)
    box.submit(request("r", prompt_len=prompt_len, max_tokens=9, beams=width, n=min(2, width), ignore_eos=False))
    box.run()
    assert len(found(box)["r"].hypotheses) == min(2, width)
    box.assert_tokens_right()
    box.step()
    box.assert_idle()


def test_searches_beside_other_work_and_each_other() -> None:
    box = Box(limits(), num_blocks=80)
    for index in range(3):
        box.submit(request(f"s{index}", prompt_len=5 + index, max_tokens=12, beams=3, n=3, arrival_ns=index))
        box.submit(request(f"r{index}", prompt_len=4, max_tokens=20, arrival_ns=10 + index))
    box.run()
    assert len(found(box)) == 3 and len(box.ends) == 3
    box.assert_tokens_right()
    box.step()
    box.assert_idle()


def test_preempted_beams_go_on_where_they_were() -> None:
    preempted = 0
    for blocks in range(20, 34, 2):
        box = Box(limits(growth_aware_admission=False), num_blocks=blocks)
        box.submit(request("senior", prompt_len=6, max_tokens=40, arrival_ns=0))
        box.submit(request("search", prompt_len=6, max_tokens=12, beams=4, n=4, arrival_ns=1))
        box.submit(request("junior", prompt_len=6, max_tokens=40, arrival_ns=2))
        box.run()
        preempted += box.core.counters.preemptions
        assert "search" in found(box)
        box.assert_tokens_right()
        box.step()
        box.assert_idle()
    assert preempted > 0


def test_a_search_waits_for_slots_for_all_of_its_beams() -> None:
    box = Box(limits(max_num_seqs=4), num_blocks=80)
    box.submit(request("r", max_tokens=10, arrival_ns=0))
    box.submit(request("s", max_tokens=6, beams=4, arrival_ns=1))
    box.submit(request("q", max_tokens=10, arrival_ns=2))
    box.run()
    starts = [start.request_id for plan in box.plans for start in plan.starts]
    assert starts[0] == "r" and starts[1] == "s" and starts[-1] == "q"
    box.assert_tokens_right()


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_a_search_ends_all_of_its_beams(steps: int) -> None:
    box = Box(limits(), num_blocks=60)
    box.submit(request("s", prompt_len=5, max_tokens=12, beams=4, n=2))
    for _ in range(steps):
        box.step()
    box.cancel("s", 1)
    box.run()
    box.step()
    assert not found(box)
    box.assert_idle()


def test_a_lost_worker_loses_a_search_once() -> None:
    box = Box(limits(), num_blocks=60)
    box.submit(request("s", prompt_len=5, max_tokens=12, beams=4, n=2))
    for _ in range(4):
        box.step()
    events = box.core.worker_lost("w0", "silent", box.now)
    assert len([event for event in events if isinstance(event, Failed)]) == 1
    assert not box.core.live_requests()


def test_searches_that_can_never_run_are_refused() -> None:
    box = Box(limits(), num_blocks=12)
    assert box.submit(request("wide", beams=9)).outcome is Outcome.INVALID
    assert box.submit(request("deep", prompt_len=10, max_tokens=10, beams=4)).outcome is Outcome.NEVER_FITS
    held = Box(limits(), "static", num_blocks=60)
    assert held.submit(request("s", beams=2)).outcome is Outcome.INVALID


def test_length_penalty_prefers_longer_or_shorter() -> None:
    lengths = {}
    for penalty in (-2.0, 0.0, 3.0):
        submit = request("s", prompt_len=5, max_tokens=30, beams=4, n=4, ignore_eos=False, length_penalty=penalty)
        best = searched(submit)[0]
        lengths[penalty] = len(best.tokens)
        assert best.score == pytest.approx(best.log_prob / len(best.tokens) ** penalty)
    assert lengths[3.0] >= lengths[-2.0]


def test_end_tokens_make_hypotheses_and_do_not_go_on() -> None:
    search = BeamSearch(Sampling(1, 5, beam_width=2), [9])
    going = search.advance([[]], [([9, 3, 4, 5], [-0.1, -0.2, -0.3, -0.4])])
    assert [(one.parent, one.token) for one in going] == [(0, 3), (0, 4)]
    assert [(h.tokens, h.end) for h in search.hypotheses] == [([9], "stop")]
    search.advance([[3], [4]], [([9, 5, 6, 7], [-9.0, -9.5, -9.6, -9.7]), ([9, 5, 6, 7], [-9.0, -9.5, -9.6, -9.7])])
    assert search.done and search.hypotheses[0].tokens == [9]


@pytest.mark.parametrize("blocks", range(16, 30))
def test_searches_that_preempt_each_other_do_not_wait_for_each_other(blocks: int) -> None:
    box = Box(limits(growth_aware_admission=False, enable_prefix_caching=False), num_blocks=blocks)
    for index in range(8):
        box.submit(request(f"s{index}", prompt_len=8, max_tokens=20, beams=2, n=2, arrival_ns=index))
    box.run()
    assert len(found(box)) == 8
    box.assert_tokens_right()
    box.step()
    box.assert_idle()
