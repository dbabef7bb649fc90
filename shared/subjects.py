"""NATS subjects of one mesh. The only place that spells them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

SERVICE_KINDS = ("gateway", "scheduler", "worker")
OBSERVER = "observer"
"""Who reads everything and says nothing: ``headrace tap``."""

LEASE_BUCKET = "headrace"
"""JetStream key-value bucket of the schedulers' leases, a key for each mesh: its name is exact in permissions."""

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
    def answered(self) -> str:
        """Where gateways tell how their answers went."""
        return f"{self.prefix}.answered"

    @property
    def roll_call(self) -> str:
        return f"{self.prefix}.roll_call"

    @property
    def everything(self) -> str:
        return f"{self.prefix}.>"

    @property
    def lease_key(self) -> str:
        """In LEASE_BUCKET."""
        return subject_token(self.mesh)


def inbox_prefix(kind: str) -> str:
    """Where replies to a service's requests go. Of its own, so that no other service may listen to them."""
    return f"_INBOX.{kind}"


@dataclass(frozen=True)
class Permissions:
    """Subjects that one kind of service needs, and nothing beyond them."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(kind: str) -> Permissions:
    """What a NATS server should allow a service, in a mesh of any name. ``kind``: SERVICE_KINDS or OBSERVER."""
    mesh = "headrace.*"
    replies, lease_stream = f"{inbox_prefix('gateway')}.>", f"KV_{LEASE_BUCKET}"
    table = {
        "gateway": Permissions(
            (f"{mesh}.submit.*.*", f"{mesh}.cancel.*", f"{mesh}.beat.gateway.*", f"{mesh}.answered"),
            (f"{mesh}.tokens.*", f"{mesh}.event.*", f"{mesh}.beat.scheduler.*", f"{mesh}.roll_call", replies),
        ),
        "scheduler": Permissions(
            (
                f"{mesh}.step.*", f"{mesh}.tokens.*", f"{mesh}.event.*", f"{mesh}.beat.scheduler.*",
                f"{mesh}.roll_call", replies, f"$JS.API.STREAM.INFO.{lease_stream}",
                f"$JS.API.STREAM.CREATE.{lease_stream}", f"$JS.API.STREAM.MSG.GET.{lease_stream}",
                f"$KV.{LEASE_BUCKET}.*",
            ),
            (
                f"{mesh}.submit.*.*", f"{mesh}.cancel.*", f"{mesh}.result.*", f"{mesh}.beat.*.*", f"{mesh}.roll_call",
                f"{mesh}.answered", f"{inbox_prefix('scheduler')}.>",
            ),
        ),
        "worker": Permissions(
            (f"{mesh}.result.*", f"{mesh}.tokens.*", f"{mesh}.beat.worker.*"),
            (f"{mesh}.step.*", f"{mesh}.roll_call"),
        ),
        OBSERVER: Permissions((), (f"{mesh}.>",)),
    }  # fmt: skip
    return table[kind]
