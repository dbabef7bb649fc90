"""Every acceptance case has a test, whose name begins with the case's id: ``test_b05_...``."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = [f"b{number:02}" for number in range(1, 29)]


def test_every_case_has_a_test() -> None:
    found: dict[str, list[str]] = {case: [] for case in CASES}
    for path in sorted(TESTS.rglob("test_*.py")):
        for case, name in re.findall(r"^(?:async )?def test_(b\d\d)_(\w+)", path.read_text("utf-8"), re.MULTILINE):
            found[case].append(f"{path.relative_to(TESTS)}::{name}")  # a KeyError names a case that does not exist
    assert not [case for case, tests in found.items() if not tests]
