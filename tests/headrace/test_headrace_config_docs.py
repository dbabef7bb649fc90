"""docs/configuration.md is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from headrace.config_docs import configuration_markdown
from headrace.services import declarations, united_options

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text("utf-8") == configuration_markdown(), (
        "run: .venv/bin/headrace config-docs > docs/configuration.md"
    )


def test_every_option_is_in_it_once_or_once_per_service() -> None:
    text = configuration_markdown()
    for option in united_options(declarations().values()):
        assert f"| `{option.flag}` |" in text


def test_no_cell_breaks_its_table() -> None:
    for line in configuration_markdown().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line
