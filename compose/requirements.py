"""Print what pyproject.toml needs, for the extras named: an image layer that code changes leave alone."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text("utf-8"))["project"]
needed = list(project["dependencies"])
for extra in sys.argv[1:]:
    needed += project["optional-dependencies"][extra]
print("\n".join(needed))
