"""Certificates for tests, made by the openssl command: a CA, and one server's certificate that it signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    ca: Path
    cert: Path
    key: Path


def make_certificate(folder: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> Certificate:
    """PEM files in ``folder``, valid for a day and for ``names``."""
    ca, ca_key, cert, key, request = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "cert.key", "csr"))
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    usage = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
    _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "1", "-subj", "/CN=test CA", *usage)
    _openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=test")
    (folder / "ext").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth\n")
    signing = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "1", "-extfile", folder / "ext"]
    _openssl("x509", "-req", "-in", request, "-out", cert, *signing)
    return Certificate(ca, cert, key)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
