"""``docs/configuration.md``, made from the declarations: ``headrace config-docs > docs/configuration.md``."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.services import declarations
from shared.config import MeshConfig, Option, Parser, options_of

HEAD = """\
# Configuration

<!-- Made by `headrace config-docs`; do not edit. -->

An option can be given in four ways; a later one wins over an earlier one:

1. its default;
2. a TOML file (`--config FILE`, or the variable `HEADRACE_CONFIG`): in the service's table, or in `[mesh]` for
   every service that has the option. `headrace up` also reads `headrace.toml` in the folder where it is run;
3. the environment: `HEADRACE_` and the name in capitals, e.g. `HEADRACE_MAX_NUM_SEQS=16`;
4. a flag, e.g. `--max-num-seqs 16`. Switches have a `--no-` form.

An unknown key, table, flag or (for `headrace up`) `HEADRACE_*` variable is an error. `headrace up` takes every option
of every service, and gives each to all services that have it; it also takes `--workers N` and
`--schedulers N`.

```toml
[mesh]
model = "default"

[scheduler]
max-num-seqs = 32

[worker]
kv-cache-memory = "2GiB"
```

Three variables are not options: `HEADRACE_CACHE` is the folder for fetched models (default: `~/.cache/headrace`),
`HEADRACE_CONFIG` names the TOML file, and `HEADRACE_CPU_ISA` says for which instruction set the C++ kernels of a CPU
worker are taken: `generic`, `avx2`, `avx512` or `avx512bf16` (default: the best that the processor has; one that it
lacks is an error), or `none` for the torch reference in their place.
"""


def configuration_markdown() -> str:
    """The whole document."""
    common = options_of(MeshConfig)
    names = {option.name for option in common}
    parts = [HEAD, _section("Every service", "In `[mesh]`, or in any service's table.", common)]
    for table, declaration in declarations().items():
        own = [option for option in options_of(declaration) if option.name not in names]
        summary = (declaration.__doc__ or "").strip().splitlines()[0]
        parts.append(_section(f"`[{table}]`", summary, own))
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    Parser(prog="headrace config-docs", description="Print docs/configuration.md.").parse_args(argv)
    print(configuration_markdown(), end="")
    return 0


def _section(title: str, summary: str, options: Sequence[Option]) -> str:
    rows = "".join(_row(option) for option in options)
    return f"## {title}\n\n{summary}\n\n| flag | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(option: Option) -> str:
    kind = " \\| ".join(option.choices) if option.choices else option.base_type.__name__
    default = "" if option.default in (None, "") else f"`{_toml(option.default)}`"
    flag = f"`{option.flag}`"
    note = (
        "; a secret: better by environment than by flag" if option.secret and "environment" not in option.help else ""
    )
    return f"| {flag} | {kind} | {default} | {option.help.replace('|', chr(92) + '|')}{note} |\n"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
