"""What the gateway knows of a mesh: the leading scheduler's last beat. Pure: time comes in as an argument."""

from __future__ import annotations

from gateway.errors import invalid, queue_full
from shared.messages import MAX_EPOCH, ModelInfo, PoolInfo, SchedulerBeat
from shared.retry import retry_after_s

NO_WORKER = "no ready worker serves"
MOST_NAMED = 8  # models that a message lists
PATIENCE_S = 2.0  # for which a new request is held while the mesh is not ready, if it was lately
LATELY_S = 10.0


class MeshView:
    """The highest epoch wins; beats of lower ones are ignored; a leader silent for ``stale_s`` counts as absent.

    Models and LoRA adapters go by name; of a model alone the adapter's is empty.
    """

    def __init__(self, stale_s: float) -> None:
        self.stale_s = stale_s
        self.epoch = 0
        self._beat: SchedulerBeat | None = None
        self._heard_s = float("-inf")  # when the leading scheduler's last beat came, monotonic seconds
        self._ready_s: dict[tuple[str, str], float] = {}  # (model, adapter) -> the last time that it was ready
        self._adapters: dict[str, list[str]] = {}  # model -> its adapters when it had a ready worker last

    def observe(self, beat: SchedulerBeat, now_s: float) -> bool:
        """Take in a beat; True if it tells of a new epoch."""
        if not max(1, self.epoch) <= beat.epoch < MAX_EPOCH:
            return False
        new_epoch = beat.epoch > self.epoch
        self.epoch = beat.epoch
        self._beat = beat
        self._heard_s = now_s
        self._ready_s = {name: ready_s for name, ready_s in self._ready_s.items() if now_s - ready_s <= LATELY_S}
        if not beat.draining:
            for info in beat.models:
                if info.workers > 0:
                    self._adapters[info.name] = info.adapters
                    self._ready_s |= dict.fromkeys([(info.name, adapter) for adapter in ("", *info.adapters)], now_s)
        return new_epoch

    def silence_s(self, now_s: float) -> float:
        """How long the leading scheduler has been silent; infinite if none was ever heard."""
        return now_s - self._heard_s

    def has_scheduler(self, now_s: float) -> bool:
        return self._beat is not None and self.silence_s(now_s) <= self.stale_s

    def model(self, name: str, now_s: float) -> ModelInfo | None:
        """The model as a live scheduler last described it, or None."""
        if self._beat is None or not self.has_scheduler(now_s):
            return None
        return next((info for info in self._beat.models if info.name == name), None)

    def ready(self, name: str, now_s: float, adapter: str = "") -> list[ModelInfo]:
        """The model as each mesh that can complete now describes it."""
        info = self.model(name, now_s)
        return [info] if info is not None and self.why_not_ready(name, now_s, adapter) is None else []

    def adapters(self, model: str, now_s: float) -> list[str]:
        """Those that ready workers of the model offer now, in order."""
        info = self.model(model, now_s)
        return info.adapters if info is not None and info.workers > 0 else []

    def knows_adapter(self, model: str, adapter: str, now_s: float) -> bool:
        """Whether the model has it: offered now, or lately, or when a worker of the model was last ready."""
        return adapter in self._adapters.get(model, ()) or self.lately_ready(model, now_s, adapter)

    def has_known(self, model: str) -> bool:
        """Whether its adapters are known: a worker of the model has been ready since this process began."""
        return model in self._adapters

    def check_room(self, name: str, now_s: float, sequences: int, tokens: int, key: str) -> None:
        """Raise the 429 of a full queue if ``sequences`` more, with ``tokens`` in all (0: not known yet), find no room.

        More than even an empty queue holds are a 400: they never will find any. What the last beat told decides: it
        costs nothing, and the scheduler's own check at submit is the one that binds. ``key`` spreads the Retry-After.
        """
        info = self.model(name, now_s)
        if info is None:
            return  # for another reason it will be refused
        if 0 < info.queue_size < sequences:
            most = f"the queue holds {info.queue_size} (--max-num-queued-reqs)"
            raise invalid(f"the prompts have {sequences} choices in all; {most}")
        if is_full(info, sequences, tokens):
            message = f"{info.waiting} requests with {info.waiting_tokens} tokens are waiting already"
            raise queue_full(message, retry_after_s(info.waiting, info.service_rate, key))

    def why_not_ready(self, name: str, now_s: float, adapter: str = "") -> str | None:
        """None if a completion by model ``name`` can succeed now, else the reason why not."""
        if not self.has_scheduler(now_s):
            return "no scheduler has been heard of lately"
        assert self._beat is not None
        if self._beat.draining:
            return "the scheduler is draining"
        info = self.model(name, now_s)
        if info is None or info.workers < 1:
            reason = f"{NO_WORKER} the model {name!r}"
            others = self.served(now_s)
            return f"{reason}; workers serve: {_listed(others)}" if others else reason
        if adapter and adapter not in info.adapters:
            return f"{NO_WORKER} the adapter {adapter!r} of the model {name!r}"
        return None

    def lately_ready(self, name: str, now_s: float, adapter: str = "") -> bool:
        """Whether a scheduler or a worker that is missing has only just gone: mostly another one is about to come."""
        return now_s - self._ready_s.get((name, adapter), float("-inf")) <= LATELY_S

    def served(self, now_s: float) -> tuple[str, ...]:
        """The models that have a ready worker, by name."""
        if self._beat is None or not self.has_scheduler(now_s):
            return ()
        return tuple(info.name for info in self._beat.models if info.workers > 0)


def is_full(queue: ModelInfo | PoolInfo, sequences: int, tokens: int) -> bool:
    """Whether a queue, as last told, has no room for so many more, with ``tokens`` in all."""
    return 0 < queue.max_waiting < queue.waiting + sequences or (
        0 < queue.max_waiting_tokens < queue.waiting_tokens + max(tokens, sequences) and queue.waiting_tokens > 0
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
