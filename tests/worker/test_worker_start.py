"""What stops a worker before it loads anything."""

from __future__ import annotations

import pytest

from kernels.cpu import library
from shared.lifecycle import StartupError
from worker.__main__ import load_runner
from worker.config import WorkerConfig


@pytest.fixture
def asked_anew() -> None:
    library.find.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_an_instruction_set_that_there_is_none_of_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_ENV, "mmx")
    with pytest.raises(StartupError, match=r"^HEADRACE_CPU_ISA: 'mmx' is none of [^\n]*$"):
        load_runner(WorkerConfig(model="/no/such/model"))
    assert load_runner(WorkerConfig(simulate=True)).capacity.device == "simulated", "which runs no kernel"
