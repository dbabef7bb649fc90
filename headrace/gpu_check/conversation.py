"""The child process that runs the stages, seen from the process that supervises it.

Lines of JSON on two pipes of their own; what libraries print on the child's stdout or stderr is kept for the case that
it ends, and its last lines say why.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any, Protocol

from headrace.parent_death import die_with_parent

Event = dict[str, Any]

TAIL_LINES = 30
NOTE_CHARACTERS = 300


class Conversation(Protocol):
    """One child, or what stands in for it in a test."""

    def ask(self, request: Event) -> None:
        """Have it run a stage. Raises OSError if it is gone."""
        ...

    def next_event(self, timeout_s: float) -> Event | None:
        """The next thing that it says; None once it has ended. Raises TimeoutError."""
        ...

    def stop(self) -> str:
        """End it, with all that it has started; the reason why it ended if it did by itself, in one line."""
        ...


class ChildProcess:
    """``python -m headrace.gpu_check.child``. Its group is its own, so that what it starts ends with it."""

    def __init__(self, environ: dict[str, str]) -> None:
        theirs_in, self._requests = os.pipe()
        self._events, theirs_out = os.pipe()
        command = [sys.executable, "-m", "headrace.gpu_check.child", str(theirs_in), str(theirs_out)]
        try:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out), start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read_events, self._read_output)]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Event) -> None:
        os.write(self._requests, json.dumps(request).encode() + b"\n")

    def next_event(self, timeout_s: float) -> Event | None:
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError from None

    def stop(self) -> str:
        ended = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._requests)
        for thread in self._threads:
            thread.join(timeout=5)
        if self._process.stdout is not None and not self._threads[-1].is_alive():
            self._process.stdout.close()
        if ended is None:
            return ""
        how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        last = next((line for line in reversed(self._tail) if line.strip()), "")
        return f"its process ended ({how}) {last}".strip()[:NOTE_CHARACTERS]

    def _read_events(self) -> None:
        with open(self._events, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # half a line, of a process that was ended
                    self._queue.put(json.loads(line))
        with contextlib.suppress(subprocess.TimeoutExpired):  # that it has ended is known before anybody is told
            self._process.wait(timeout=5)
        self._queue.put(None)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.decode(errors="replace").rstrip())
