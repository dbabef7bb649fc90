"""What the mesh did while the load ran, read off the bus: every step's duration, idle gap and rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.bus import NatsBus
from shared.messages import AnyMessage, BadMessage, StepPlan, StepResult, decode
from shared.subjects import Subjects


@dataclass
class Observer:
    forward_us: list[int] = field(default_factory=list)
    gap_us: list[int] = field(default_factory=list)  # of steps before which work was in hand
    rows: int = 0
    padding_rows: int = 0
    new_tokens: int = 0
    starts: int = 0
    slot_steps: int = 0  # slots with a row, or held idle, over all steps
    idle_slot_steps: int = 0
    _backlog: dict[tuple[str, int], bool] = field(default_factory=dict)
    recording: bool = False

    async def attach(self, bus: NatsBus, mesh: str) -> None:
        await bus.subscribe(Subjects(mesh).everything, self._on_message)
        await bus.flush()

    def _on_message(self, payload: bytes, _: str) -> None:
        if not self.recording:
            return
        try:
            self.see(decode(payload))
        except BadMessage:
            return

    def see(self, message: AnyMessage) -> None:
        """Note a plan or a result, however it went by."""
        if isinstance(message, StepPlan):
            self._backlog[message.worker, message.step] = message.backlog
            self.starts += len(message.starts)
            idle = len(message.padding) if message.decodes else 0
            self.idle_slot_steps += idle
            self.slot_steps += len(message.decodes) + len(message.chunks) + idle
        elif isinstance(message, StepResult) and message.rows:
            self.forward_us.append(message.forward_us)
            if self._backlog.pop((message.worker, message.step), False):
                self.gap_us.append(message.gap_us)
            self.rows += message.rows
            self.padding_rows += message.padding_rows
            self.new_tokens += sum(token >= 0 for token in message.tokens)
