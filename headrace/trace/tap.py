"""``headrace tap``: live bus traffic, one line a message; and the same for a recorded trace."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.trace.stream import BadTrace, message, records
from shared.bus import BusUnavailable, NatsBus
from shared.config import MeshConfig, at_least, option, parse_service
from shared.lifecycle import StartupError, run
from shared.messages import BadMessage, Message, decode
from shared.subjects import OBSERVER, Subjects

_LONGEST_VALUE = 60
_PATTERNS = ("submit.*.*", "cancel.*", "step.*", "result.*", "tokens.*", "event.*", "beat.*.*", "roll_call")


@dataclass(frozen=True)
class TapConfig(MeshConfig):
    """Print the messages of a mesh as they pass, and record them."""

    record: str = option("", "also append each message to this file, as msgpack arrays [unix_ns, kind, message]")
    read: str = option("", "print this recorded trace (of tap or of the scheduler) instead of live traffic")
    only: str = option("", "print only lines that contain this text, e.g. a request id")
    full: bool = option(False, "print whole messages")
    count: int = option(0, "stop after so many messages; 0: never", check=at_least(0))


def line(at_ns: int, kind: str, payload: bytes, full: bool = False) -> str:
    """One message for a person: time of day, kind of subject, fields that differ from their defaults."""
    clock = time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9)) + f".{at_ns // 1_000_000 % 1000:03d}"
    try:
        return f"{clock} {kind:<7} {_described(decode(payload), full)}"
    except BadMessage:
        return f"{clock} {kind:<7} no message of ours: {len(payload)} bytes"


def _described(value: Any, full: bool) -> str:
    if isinstance(value, Message):
        fields = []
        for info in msgspec.structs.fields(value):
            one = getattr(value, info.name)
            default = info.default_factory() if callable(info.default_factory) else info.default
            if full or one != default:
                fields.append(f"{info.name}={_described(one, full)}")
        tag = value.__struct_config__.tag
        return f"{tag or ''}({', '.join(fields)})"
    if isinstance(value, list | tuple) and any(isinstance(item, Message) for item in value):
        shown = value if full else value[:4]
        more = "" if len(shown) == len(value) else f", … {len(value)} in all"
        return "[" + ", ".join(_described(item, full) for item in shown) + more + "]"
    text = f"<{len(value)} bytes>" if isinstance(value, bytes) and not full else repr(value)
    return text if full or len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


class Tap:
    """Subscribes to a mesh. ``stop`` is set once ``count`` messages were seen, or nobody reads what is printed."""

    def __init__(self, config: TapConfig, out: Callable[[str], None], record: BinaryIO | None) -> None:
        self._config = config
        self._out = out
        self._record = record
        self._encoder = msgspec.msgpack.Encoder()
        self.seen = 0
        self.stop = asyncio.Event()

    async def attach(self, bus: NatsBus) -> None:
        prefix = Subjects(self._config.mesh).prefix
        for pattern in _PATTERNS:
            await bus.subscribe(f"{prefix}.{pattern}", self._handler(pattern.partition(".")[0]))
        await bus.flush()

    def _handler(self, kind: str) -> Callable[[bytes, str], None]:
        return lambda payload, _: self.take(kind, payload, time.time_ns())

    def take(self, kind: str, payload: bytes, at_ns: int) -> None:
        if self.stop.is_set():
            return
        shown = line(at_ns, kind, payload, self._config.full)
        if self._config.only and self._config.only not in shown:
            return
        self.seen += 1
        try:
            self._out(shown)
        except BrokenPipeError:  # `| head` has what it wanted; raised here, it would be the bus's to report
            self.stop.set()
            return
        if self._record is not None:
            try:
                message = decode(payload)
            except BadMessage:
                pass  # bytes that are no message of ours would break the stream for every reader
            else:
                self._record.write(self._encoder.encode((at_ns, kind, message)))
        if self._config.count and self.seen >= self._config.count:
            self.stop.set()


async def _live(config: TapConfig, record: BinaryIO | None, stop: asyncio.Event) -> None:
    try:
        bus = await NatsBus.join(config, OBSERVER, "tap")
    except BusUnavailable as error:
        raise StartupError(str(error)) from None
    tap = Tap(config, lambda text: print(text, flush=True), record)
    await tap.attach(bus)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, tap.stop)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await bus.close()


def _read(config: TapConfig) -> int:
    shown = 0
    try:
        for at_ns, kind, *rest in records(Path(config.read)):
            text = f"{at_ns} {kind} " + " ".join(_plain(value, config.full) for value in rest)
            if config.only in text:
                print(text)
                shown += 1
                if shown == config.count:
                    break
    except BadTrace as error:
        print(f"headrace tap: {error}", file=sys.stderr)
        return 2
    return 0


def _plain(value: Any, full: bool) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str):
        try:
            return _described(message(value), full)
        except BadTrace:
            pass  # a list that only looks like one
    return _described(value, full)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_service(TapConfig, "tap", "headrace tap", argv)
    if config.read:
        return _read(config)
    try:
        record = Path(config.record).open("ab") if config.record else None  # noqa: SIM115 (closed below)
    except OSError as error:
        print(f"headrace tap: --record {config.record}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        return run(lambda stop: _live(config, record, stop))
    finally:
        if record is not None:
            record.close()
