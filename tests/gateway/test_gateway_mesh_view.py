"""Readiness and epochs, from beats and a clock."""

from __future__ import annotations

from gateway.mesh_view import MeshView
from shared.messages import ModelInfo, SchedulerBeat


def beat(epoch: int, workers: int = 1, draining: bool = False, name: str = "m") -> SchedulerBeat:
    return SchedulerBeat("s", epoch, [ModelInfo(name, 100, 50, workers)], draining=draining)


def test_nothing_heard_is_not_ready() -> None:
    view = MeshView(3.0)
    assert view.why_not_ready("m", 0.0) is not None
    assert view.model("m", 0.0) is None
    assert view.silence_s(0.0) == float("inf")


def test_a_fresh_beat_with_a_worker_is_ready_until_it_is_stale() -> None:
    view = MeshView(3.0)
    assert view.observe(beat(2), 10.0)
    assert view.why_not_ready("m", 13.0) is None
    assert view.why_not_ready("m", 13.1) is not None
    assert not view.observe(beat(2), 20.0)
    assert view.why_not_ready("m", 20.0) is None


def test_no_worker_another_model_and_draining_are_not_ready() -> None:
    view = MeshView(3.0)
    view.observe(beat(2, workers=0), 0.0)
    assert "no ready worker" in (view.why_not_ready("m", 0.0) or "")
    view.observe(beat(2, name="other"), 0.0)
    assert view.why_not_ready("m", 0.0) is not None
    assert (view.why_not_ready("m", 0.0) or "").endswith("'m'; workers serve: other")
    many = [ModelInfo(f"m{number}", 100, 50, number) for number in range(11)]
    view.observe(SchedulerBeat("s", 2, many), 0.0)
    assert (view.why_not_ready("m", 0.0) or "").endswith("workers serve: m1, m2, m3, m4, m5, m6, m7, m8 and 2 more")
    view.observe(beat(2, draining=True), 0.0)
    assert "draining" in (view.why_not_ready("m", 0.0) or "")


def test_the_highest_epoch_wins() -> None:
    view = MeshView(3.0)
    view.observe(beat(2), 0.0)
    assert view.observe(beat(5, workers=0), 1.0)
    assert not view.observe(beat(2), 100.0)
    assert view.epoch == 5
    assert view.silence_s(100.0) == 99.0
    assert not view.observe(beat(0), 100.0)


def test_a_mesh_that_was_ready_within_ten_seconds_was_so_lately() -> None:
    view = MeshView(3.0)
    assert not view.lately_ready("m", 0.0)
    view.observe(beat(2), 100.0)
    view.observe(beat(2, workers=0), 101.0)
    view.observe(beat(3, draining=True), 102.0)
    assert view.lately_ready("m", 110.0) and not view.lately_ready("m", 110.1)
    assert not view.lately_ready("other", 102.0)
    view.observe(beat(3, name="other"), 120.0)
    assert not view.lately_ready("m", 110.0), "what is too old is forgotten"
