"""How many connections the process may hold: each is a file descriptor, and the system's limit is often 1024."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("headrace.gateway")

OTHER_FILES = 256  # listeners, NATS, the metrics listener's clients, refused connections that linger, modules


def allow_connections(wanted: int) -> int:
    """Raise the soft limit on open files as far as ``wanted`` connections need; returns how many fit under it.

    A process may raise its soft limit up to the hard one (setrlimit(2)); what does not fit is said in the log.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + OTHER_FILES
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < need:
        soft = need if hard == unlimited else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= need:
        return wanted
    fit = max(1, soft - OTHER_FILES)
    log.warning(
        "at most %d connections at once instead of %d: the hard limit on open files is %d (ulimit -Hn)",
        fit, wanted, hard,
    )  # fmt: skip
    return fit
