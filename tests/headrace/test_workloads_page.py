"""``docs/workloads.md`` names options that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from headrace.simulate.figures import SECTIONS

DOCS = Path(__file__).parents[2] / "docs"


def test_every_flag_exists() -> None:
    page = (DOCS / "workloads.md").read_text()
    options = set(re.findall(r"`(--[a-z-]+)`", (DOCS / "configuration.md").read_text()))
    command = [sys.executable, "-m", "headrace", "simulate", "--help"]
    simulated = set(
        re.findall(r"--[a-z-]+", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )
    blocks = re.findall(r"```sh\n(.*?)```", page, re.S)
    assert len(blocks) >= 6
    for block in blocks:
        if figures := re.fullmatch(r"headrace simulate figures --only ([a-z-]+) +#.*\n", block):
            assert figures[1] in SECTIONS
            continue
        assert block.startswith("headrace simulate ") and set(re.findall(r"--[a-z-]+", block)) <= simulated, block
        for variant in re.findall(r"([a-z-]+)=", block):
            assert f"--{variant}" in simulated or f"--no-{variant}" in simulated, variant
    prose = re.sub(r"```sh\n.*?```", "", page, flags=re.S)
    assert set(re.findall(r"--[a-z][a-z-]+", prose)) <= options


def test_the_readme_leads_to_it() -> None:
    assert "(docs/workloads.md)" in (DOCS.parent / "README.md").read_text()
