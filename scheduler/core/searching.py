"""Beam search in the core: forks, feeds and drops beams as the search says, in terms of sequences and pages."""

from __future__ import annotations

from scheduler.core.events import CoreEvent, Ended, Found
from scheduler.core.sequence import BeamGroup, Sequence, Status
from scheduler.core.state import CoreState
from scheduler.core.worker_state import WorkerState
from shared.messages import (
    EndReason,
)


class SearchingState(CoreState):
    """The state, with the beams of its searches."""

    def _search(self, worker: WorkerState, group: BeamGroup, now: int, events: list[CoreEvent]) -> None:
        """Every beam's continuations are in: fork, feed and drop beams. Reordering is bookkeeping: pages are shared."""
        beams = group.members
        generated = [beam.tokens[beam.prompt_len :] for beam in beams]
        going_on = group.search.advance(generated, [group.ready[beam.choice] for beam in beams])
        group.ready = {}
        request = self._requests[beams[0].request_id]
        taken: set[int] = set()
        members: list[Sequence] = []
        fed: list[tuple[Sequence, int]] = []
        for one in going_on:
            parent = beams[one.parent]
            if one.parent in taken:
                member = self._fork_beam(worker, group, parent, now)
                request.sequences.append(member)
            else:
                taken.add(one.parent)
                member = parent
            members.append(member)
            fed.append((member, one.token))
        for member, token in fed:  # after every fork: a fork has its parent's tokens without the new one
            member.tokens.append(token)
            if member.status is Status.RUNNING and member not in worker.forks:
                worker.feeds.append((member, token))
        for index, beam in enumerate(beams):
            if index not in taken:
                self._leave(beam)
                self._end(beam, EndReason.STOP.value, now)
        request.sequences = [sequence for sequence in request.sequences if sequence.status is not Status.ENDED] or beams
        if group.search.done:
            submit = beams[0].submit
            self.counters.finished += 1
            self.lengths.observe(len(group.search.hypotheses[0].tokens))
            events.append(Found(submit, group.search.hypotheses[: submit.n], now))
            events.append(Ended(beams[0], group.search.hypotheses[0].end, now))
        else:
            group.members = members

    def _fork_beam(self, worker: WorkerState, group: BeamGroup, parent: Sequence, now: int) -> Sequence:
        choice, group.next_choice = group.next_choice, group.next_choice + 1
        submit = parent.submit
        child = Sequence(
            submit, choice, list(parent.tokens), parent.prompt_len, (*parent.seniority[:3], choice),
            parent.submitted_ns, parent.home, worker=worker.name, admitted_ns=now, first_token_ns=now,
            deadline=parent.deadline, group=group, rank=parent.rank, charged=parent.generated,
        )  # fmt: skip
        self._created += 1
        self.counters.admitted += 1
        self.counters.forks += 1
        self._requests[submit.request_id].live += 1
        self.fairness.fork(submit.tenant)
        if child.deadline:
            self._deadlines[id(child)] = child
        child.chain, child.chain_root = list(parent.chain), parent.chain_root
        if parent.status is Status.RUNNING:
            child.pages = worker.written(parent)
            worker.pool.share(child.pages)
            child.scheduled, child.registered = parent.scheduled, parent.registered
            child.shares_tail = parent.shares_tail = True
            child.become(Status.RUNNING)
            child.slot = worker.take_slot()
            worker.running.add(child)
            worker.forks.append(child)
        else:
            child.become(Status.PREEMPTED)
            worker.add_preempted(child)
        return child
