"""From a transfer's thread to the step loop's, which alone gives work to a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from worker.transfer.errors import TransferFailed

LOOKS_S = 0.05
"""How often whoever waits for the step loop's thread looks whether the transfer is to end: the thread may itself be
waiting for that."""

T = TypeVar("T")

Call = Callable[[Callable[[], None]], None]
"""Has the step loop's thread do something soon."""


class OnLoop:
    """Implements :class:`~worker.transfer.pages.Launch`. ``ended`` says why the transfer is to end, if it is."""

    def __init__(self, call: Call, ended: Callable[[], str]) -> None:
        self._call = call
        self._ended = ended

    def __call__(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # noqa: BLE001  raised again by whoever waits
                    done.set_exception(error)

        self._call(run)
        while True:
            try:
                return done.result(LOOKS_S)
            except CancelledError:
                raise TransferFailed(self._ended()) from None
            except TimeoutError:
                if done.done():  # it is the work's own
                    return done.result()
                if self._ended():
                    done.cancel()  # unless it runs
