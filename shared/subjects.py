"""NATS subjects of one mesh. The only place that spells them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_SAFE = re.compile(r"[A-Za-z0-9_-]+")


def subject_token(name: str) -> str:
    """``name`` as one subject token: unchanged if safe, else made safe with a digest, so that names stay distinct."""
    if _SAFE.fullmatch(name) and len(name) <= 64:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:48] + "-" + digest


@dataclass(frozen=True)
class Subjects:
    """Subjects under ``headrace.<mesh>.``; ids given here are made safe."""

    mesh: str = "default"

    @property
    def prefix(self) -> str:
        return f"headrace.{subject_token(self.mesh)}"

    def submit(self, model: str, epoch: int) -> str:
        return f"{self.prefix}.submit.{subject_token(model)}.{epoch}"

    def submit_all(self, epoch: int) -> str:
        return f"{self.prefix}.submit.*.{epoch}"

    def cancel(self, epoch: int) -> str:
        return f"{self.prefix}.cancel.{epoch}"

    def step(self, worker: str) -> str:
        return f"{self.prefix}.step.{subject_token(worker)}"

    def result(self, epoch: int) -> str:
        """Where a worker answers plans of ``epoch``: the plan says its epoch, not its scheduler's name."""
        return f"{self.prefix}.result.{epoch}"

    def tokens(self, gateway: str) -> str:
        return f"{self.prefix}.tokens.{subject_token(gateway)}"

    def event(self, gateway: str) -> str:
        return f"{self.prefix}.event.{subject_token(gateway)}"

    def beat(self, kind: str, name: str) -> str:
        return f"{self.prefix}.beat.{kind}.{subject_token(name)}"

    def beats(self, kind: str = "*") -> str:
        return f"{self.prefix}.beat.{kind}.*"

    @property
    def roll_call(self) -> str:
        return f"{self.prefix}.roll_call"

    @property
    def everything(self) -> str:
        return f"{self.prefix}.>"
