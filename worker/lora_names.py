"""Names and folders of LoRA adapters: what an option that lists some means, and what is seen of them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.lifecycle import StartupError

LONGEST = 200

CONFIG = "adapter_config.json"


def parse_adapters(text: str) -> dict[str, str]:
    """``name=folder,name=folder...`` by name. Raises ValueError, with what is wrong."""
    adapters: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, given, path = item.partition("=")
        name, path = name.strip(), path.strip()
        if not (given and name and path):
            raise ValueError(f"{item!r} is not NAME=FOLDER")
        if len(name) > LONGEST or not name.isprintable():
            raise ValueError(f"the name {name[:40]!r} is longer than {LONGEST} characters, or can't be printed")
        if name in adapters:
            raise ValueError(f"{name!r} is there twice")
        adapters[name] = path
    return adapters


def are_adapters(text: str) -> str | None:
    """What is wrong with an option's value, or None."""
    try:
        parse_adapters(text)
    except ValueError as error:
        return f"must be NAME=FOLDER, several separated by commas: {error}"
    return None


def refusal(name: str, path: str, reason: str) -> StartupError:
    return StartupError(f"LoRA adapter {name!r} ({path}) can't be served: {reason}")


def check_folders(adapters: Mapping[str, str]) -> None:
    """Known before the model is loaded: raise StartupError if a folder is not there, or no adapter's."""
    for name, path in adapters.items():
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise refusal(name, path, "there is no such folder")
        if not (folder / CONFIG).is_file():
            raise refusal(name, path, f"it has no {CONFIG}")
