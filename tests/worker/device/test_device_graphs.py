"""Which decode steps run as graphs, at which sizes, and what the rows that stand for nothing touch."""

from __future__ import annotations

import pytest
import torch
from hash_model import HashModel
from rehearsal_port import RehearsalPort

from shared.messages import Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch
from worker.device.graphs import WARM_UPS, DecodeGraphs, bounds_up_to, key_bound, padded, sizes_up_to
from worker.device.port import Uploads, fetch
from worker.device.state import Delta, DeviceState
from worker.device.upload import Packing

BLOCK, SLOTS, LONGEST = 4, 6, 2000


def test_sizes() -> None:
    assert sizes_up_to(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert sizes_up_to(30) == [1, 2, 4, 8, 16, 24, 30]
    assert sizes_up_to(3) == [1, 2, 3] and sizes_up_to(1) == [1] and sizes_up_to(0) == []


def test_bounds_on_keys() -> None:
    assert [key_bound(keys, LONGEST) for keys in (1, 512, 513, 1024, 1025, LONGEST)] == [
        512, 512, 1024, 1024, LONGEST, LONGEST
    ]  # fmt: skip
    assert key_bound(40, 100) == 100
    for longest in (1, 100, 512, 513, LONGEST, 4096):
        assert bounds_up_to(longest) == sorted({key_bound(keys, longest) for keys in range(1, longest + 1)})


class Stand:
    def __init__(self, largest: int = 8, room: int = 1 << 40) -> None:
        self.port = RehearsalPort()
        self.model = HashModel(20, BLOCK)
        self.state = DeviceState(self.port.device, SLOTS, LONGEST // BLOCK)
        self.state.tables[:SLOTS, 0] = torch.arange(1, SLOTS + 1)
        self.graphs = DecodeGraphs(self.model, self.state, self.port, BLOCK, LONGEST, largest, room)

    def decode(self, slots: list[int], positions: list[int], keys: int = 4) -> torch.Tensor:
        size = self.graphs.size_for(len(slots))
        assert size is not None
        inputs = torch.tensor(padded(slots, positions, size, self.state.scratch))
        self.graphs.launch(inputs, keys)
        fetched = fetch(self.port, lambda: [self.graphs.logits(len(slots))])
        fetched.ready.wait()
        return torch.from_numpy(fetched.arrays()[0].copy())


def test_a_graph_is_captured_after_steps_of_its_own_size_and_says_the_same() -> None:
    stand = Stand()
    said = [stand.decode([3, 0, 5], [1, 2, 0]) for _ in range(WARM_UPS + 3)]
    assert stand.port.captures == 1 and stand.graphs.replays == 3
    assert {rows for rows, _ in stand.model.shapes} == {4}, "warm-ups run at the graph's size"
    assert all(torch.equal(one, said[0]) for one in said) and not said[0].isnan().any()
    other = stand.decode([1, 2, 4], [3, 1, 2])
    assert stand.graphs.replays == 4
    plain = Stand()
    assert torch.equal(other, plain.decode([1, 2, 4], [3, 1, 2]))


def test_what_is_captured_ahead_serves_whatever_comes() -> None:
    stand = Stand(largest=3)
    ahead = stand.graphs.ahead()
    assert ahead == [(size, keys, False) for keys in (512, 1024, LONGEST) for size in (3, 2, 1)]
    for key in ahead:
        stand.graphs.capture(*key)
    assert stand.port.captures == len(stand.graphs) == len(ahead) and not stand.graphs.replays
    stand.port.synchronize()
    assert not (stand.model.caches[0].key.flatten(1) != 0)[1:].any(), "a step of nobody's has written a page"
    for keys in (4, 600, LONGEST):
        assert torch.equal(stand.decode([3, 0], [1, 2], keys), Stand().decode([3, 0], [1, 2]))
    assert stand.port.captures == len(ahead) and stand.graphs.replays == 3


def test_a_pass_that_lacks_memory_ends_what_is_captured_ahead() -> None:
    stand = Stand()
    stand.port.lacking = lambda: 3
    stand.graphs.capture(8, 512)
    assert not stand.graphs.open and not len(stand.graphs)


@pytest.mark.parametrize("steps", [1, WARM_UPS + 2])
def test_rows_that_stand_for_nothing_write_to_the_scratch_page_only(steps: int) -> None:
    stand = Stand()
    for _ in range(steps):
        stand.decode([0, 1, 2, 3, 4], [0, 1, 2, 3, 0])
    written = stand.model.caches[0].key.flatten(1) != 0
    assert written.nonzero().tolist() == [[0, 0], [1, 0], [2, 1], [3, 2], [4, 3], [5, 0]]
    assert not stand.state.tables[stand.state.scratch].any()


def test_longer_sequences_have_graphs_of_their_own() -> None:
    stand = Stand()
    for keys in (4, 400, 600, 900) * (WARM_UPS + 1):
        stand.decode([0], [3], keys)
    assert {keys for _, keys in stand.model.shapes} == {512, 1024} and len(stand.graphs) == 2


def test_more_rows_than_the_largest_graph_run_elsewhere() -> None:
    stand = Stand(largest=4)
    assert [stand.graphs.size_for(rows) for rows in (1, 3, 4, 5)] == [1, 4, 4, None]
    assert Stand(largest=0).graphs.size_for(1) is None


def test_the_least_recently_used_graph_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.graphs.MOST_GRAPHS", 2)
    stand = Stand()
    for slots in ([0], [0, 1], [0], [0, 1, 2, 3]):
        for _ in range(WARM_UPS + 1):
            stand.decode(slots, [0] * len(slots))
    assert len(stand.graphs) == 2 and stand.port.captures == 3
    replays = stand.graphs.replays
    stand.decode([0], [0])
    assert stand.graphs.replays == replays + 1
    stand.decode([0, 1], [0, 0])
    assert stand.graphs.replays == replays + 1, "the graph of two rows was to go"


@pytest.mark.parametrize("why", ["room", "memory", "refusal"])
def test_where_there_can_be_no_more_graphs_steps_run_without(why: str) -> None:
    stand = Stand(room=1 if why == "room" else 1 << 40)
    if why == "memory":
        stand.port.refuses_graphs = stand.port.out_of_memory("out of memory")
    elif why == "refusal":
        stand.port.refuses_graphs = RuntimeError("operation not permitted when stream is capturing")
    for slots in ([0], [0, 1]):
        for _ in range(WARM_UPS + 2):
            said = stand.decode(slots, [0] * len(slots))
    assert len(stand.graphs) == (1 if why == "room" else 0)
    assert torch.equal(said, Stand().decode([0, 1], [0, 0]))


def test_what_a_graph_takes_is_not_made_up_for_by_what_its_capture_gives_back() -> None:
    stand = Stand(room=1 << 40)
    stand.port.kept = 5 << 20
    for _ in range(WARM_UPS + 1):
        stand.decode([0], [0])
    assert stand.graphs.used == 1 << 20 and not stand.port.kept


def test_graphs_that_gave_way_too_often_do_not_come_back() -> None:
    stand = Stand()
    for drops in range(5):
        for _ in range(WARM_UPS + 1):
            stand.decode([0], [0])
        assert len(stand.graphs) == (drops < 3)
        stand.graphs.drop()


def test_memory_for_uploads_is_used_again_only_when_the_copy_from_it_has_run() -> None:
    port = RehearsalPort()  # which runs copies as late as can be
    uploads = Uploads(port, places=2)
    there = [uploads(torch.full((3 + number,), number, dtype=torch.uint8).numpy()) for number in range(7)]
    port.synchronize()
    assert [tensor.tolist() for tensor in there] == [[number] * (3 + number) for number in range(7)]


def test_what_is_fetched_can_not_be_read_before_it_has_come() -> None:
    port = RehearsalPort()
    source = torch.zeros(2)
    port.run(lambda: source.add_(5))
    fetched = fetch(port, lambda: [source])
    with pytest.raises(RuntimeError, match="before they had come"):
        fetched.arrays()
    fetched.ready.wait()
    assert fetched.arrays()[0].tolist() == [5, 5]


def test_a_last_token_is_that_of_its_sequence_and_not_of_the_next_one_in_its_slot() -> None:
    made = Batch(BLOCK, 20, 64, frozenset())
    tokens = pack_tokens([1, 2, 3])
    starts = [SlotStart(0, name, 1, 0, "g", tokens, 3, [1], Sampling(1, 4), computed=2) for name in ("one", "other")]
    made.stage(StepPlan(1, "w", 1, 1, starts=starts[:1]))
    one = made.slots[0]
    made.stage(StepPlan(1, "w", 1, 2, drops=[0], starts=starts[1:]))
    other = made.slots[0]
    stand = Stand()
    assert not stand.state.has(one, 2)
    stand.state.hold(one, 2)
    assert stand.state.has(one, 2) and not stand.state.has(one, 3) and not stand.state.has(other, 2)
    packing = Packing()
    delta = Delta(stand.state, made, [(other, 2)], packing)
    uploaded = packing.send(Uploads(stand.port))
    stand.port.run(lambda: delta.apply(uploaded))
    stand.port.synchronize()
    assert stand.state.last_token[0] == 3 and stand.state.tables[0, 0] == 1 and not made.changed
