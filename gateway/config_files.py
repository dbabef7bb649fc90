"""What a gateway's configuration names, tried before anything starts. Light: ``headrace up`` asks too."""

from __future__ import annotations

import ssl

from gateway.config import GatewayConfig
from gateway.keys import Keyring, KeysError
from shared.lifecycle import StartupError


def check_files(config: GatewayConfig) -> None:
    """Raise :class:`StartupError`, one line that names the option, if models, certificate or keys cannot be used."""
    check_tls(config)
    try:
        known = {source.name for source in config.sources}
    except ValueError as error:
        raise StartupError(f"--model {error}") from None
    if unknown := [name for name in config.parsers if name and name not in known]:
        raise StartupError(f"--tool-call-parser names {unknown[0]!r}, which is none of the models")
    try:
        Keyring(config.api_keys, config.api_key)
    except KeysError as error:
        raise StartupError(f"--api-keys {error}") from None


def check_tls(config: GatewayConfig) -> None:
    """Raise :class:`StartupError` unless the certificate and its key, where given, can be used."""
    if not config.tls_cert:
        if config.tls_key:
            raise StartupError("--tls-key is given without --tls-cert")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise StartupError(f"--tls-cert {config.tls_cert}: {getattr(error, 'strerror', '') or error}") from None
