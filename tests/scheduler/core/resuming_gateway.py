"""The gateway's half of the mesh in a box: it resumes what is lost.

It raises the attempt, hands over the tokens it has, and ignores entries of older attempts.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from mesh_in_a_box import Box

from scheduler.core.events import Ended, Failed
from scheduler.core.sequence import Sequence
from shared.messages import Outcome, Submit, SubmitReply, pack_tokens


class ResumingBox(Box):
    def __init__(self, *args: object, **kwargs: int) -> None:
        self.lost: list[str] = []  # requests to resume
        self.left: set[tuple[str, int]] = set()  # choices that their clients cancelled, or that were dropped
        self.accepted: list[tuple[str, int, int]] = []  # (request, attempt, choice)
        self.ended: Counter[tuple[str, int, int]] = Counter()
        self.seen: Counter[str] = Counter()  # what happened, by kind
        self._observed = 0
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def submit(self, submit: Submit, deadline: int = 0) -> SubmitReply:
        reply = super().submit(submit, deadline)
        if reply.outcome is Outcome.ACCEPTED:
            for choice in range(1 if submit.sampling.beam_width else submit.n):
                if choice not in submit.done_choices:
                    self.accepted.append((submit.request_id, submit.attempt, choice))
        return reply

    def cancel(self, request_id: str, choice: int = -1) -> None:
        submit = self.submits.get(request_id)
        super().cancel(request_id, choice)
        if submit is not None:
            whole = choice == -1 or submit.sampling.beam_width
            self.left.update((request_id, one) for one in (range(submit.n) if whole else [choice]))
        elif choice == -1:
            self.left.update((request_id, one) for one in range(8))  # it overtook its submit

    def observe(self) -> None:
        """Take note of what the core said since the last time; everything ends at most once."""
        for event in self.events[self._observed :]:
            if not isinstance(event, Ended | Failed):
                continue
            key = self._key(event.sequence)
            if event.sequence.group is not None and self.ended[key]:
                continue  # a search that is cancelled or dropped ends beam by beam
            self.ended[key] += 1
            assert self.ended[key] == 1, f"{key} ended twice"
            if isinstance(event, Failed) and event.kind in ("lost", "moved"):
                self.seen[event.kind] += 1
                if key[0] not in self.lost:
                    self.lost.append(key[0])
            elif isinstance(event, Failed):
                self.left.add((key[0], key[2]))
        self._observed = len(self.events)

    def resume(self) -> None:
        """Resubmit what was lost. What the queue has no place for is tried again the next time."""
        waiting, self.lost = self.lost, []
        for request_id in waiting:
            submit = self.submits[request_id]
            searches = submit.sampling.beam_width > 0
            choices = range(1 if searches else submit.n)
            done = [c for c in choices if (request_id, c) in self.left or (request_id, c) in self.ends]
            if len(done) == len(choices):
                continue
            has = []
            if not searches:
                has = [b"" if c in done else pack_tokens(self.delivered.get((request_id, c), [])) for c in choices]
            again = msgspec.structs.replace(submit, attempt=submit.attempt + 1, resumed=has, done_choices=done)
            reply = self.submit(again)
            if reply.outcome is Outcome.ACCEPTED:
                self.seen["resumed"] += 1
                self.seen["resumed with tokens"] += any(has)
            else:
                assert reply.outcome in (Outcome.NO_WORKER, Outcome.UNKNOWN_MODEL), reply.reason
                self.lost.append(request_id)

    def check_ends(self) -> None:
        """Invariant 3: of the last attempt of every request, each choice ended (each once: ``observe``)."""
        for request_id, attempt, choice in self.accepted:
            if attempt == self.submits[request_id].attempt and (request_id, choice) not in self.left:
                key = (request_id, attempt, choice)
                assert self.ended[key] == 1, f"{key} was accepted and has no end"

    @staticmethod
    def _key(sequence: Sequence) -> tuple[str, int, int]:
        choice = 0 if sequence.group is not None else sequence.choice  # a search ends as one
        return (sequence.request_id, sequence.submit.attempt, choice)
