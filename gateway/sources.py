"""What ``--model``, ``--mesh`` and ``--tool-call-parser`` name, where a gateway has several. Nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.model_name import model_name

AUTO = "auto"
PARSERS = (AUTO, "hermes", "llama3_json", "mistral")


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str  # in the API and in the mesh
    path: str  # a folder or an id


def sources(model: str, served_model_name: str = "") -> tuple[ModelSource, ...]:
    """One model under its own name or ``served_model_name``, or those of a list. Raises ValueError.

    What exists as it is spelled is one model: a folder's name may have ``=`` in it.
    """
    if Path(model).expanduser().exists() or not ("=" in model or "," in model):
        return (ModelSource(model_name(model, served_model_name), model),)
    if served_model_name:
        raise ValueError("names its models itself; --served-model-name is for a gateway of one")
    named = _by_name(model, "NAME=MODEL")
    if "" in named:
        raise ValueError(_throughout("NAME=MODEL"))
    return tuple(ModelSource(name, path) for name, path in named.items())


def sources_problem(model: str) -> str | None:
    """A check: what is wrong with ``--model``."""
    try:
        sources(model)
    except ValueError as error:
        return str(error)
    return None


def parsers(text: str) -> dict[str, str]:
    """How models write tool calls, by their names; under the empty name that of all others. Raises ValueError."""
    return _by_name(text, "NAME=PARSER")


def parsers_problem(text: str) -> str | None:
    """A check: what is wrong with ``--tool-call-parser``."""
    try:
        unknown = [parser for parser in parsers(text).values() if parser not in PARSERS]
    except ValueError as error:
        return str(error)
    return f"has {unknown[0]!r}, which is none of {', '.join(PARSERS)}" if unknown else None


def meshes(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def meshes_problem(text: str) -> str | None:
    """A check: what is wrong with ``--mesh``."""
    names = meshes(text)
    if len(names) > 1 and not all(names):
        return "must be names, separated by commas"
    return "has a name twice" if len(set(names)) < len(names) else None


def _by_name(text: str, form: str) -> dict[str, str]:
    """Items of ``form``, separated by commas; a value alone is under the empty name."""
    found: dict[str, str] = {}
    for item in text.split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            name, value = "", name
        if not value or (separator and not name):
            raise ValueError(f"must be {form}, or several of these separated by commas")
        if name in found:
            raise ValueError(f"names {name!r} twice" if name else _throughout(form))
        found[name] = value
    return found


def _throughout(form: str) -> str:
    return f"must be {form} throughout, separated by commas, where there are several"
