"""``headrace bench``: the same load on the same real mesh under several settings, measured side by side."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Loaded late: the bench needs an HTTP client that the services do not."""
    from headrace.bench.main import main as run

    return run(argv)
