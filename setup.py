"""What pyproject.toml cannot say: that the wheel holds a shared library with a plain C ABI, if a C++ compiler is there.

``kernels/cpu/build.py`` compiles it. Without a compiler Headrace is installed all the same, and its CPU workers use the
torch reference. The library knows nothing of Python: its wheel is for one platform but for any Python, and a wheel
without it is for any platform.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from kernels.cpu import build  # noqa: E402  of this tree

LIBRARY = "kernels.cpu." + build.LIBRARY_NAME.removesuffix(".so")


class BuildKernels(build_ext):
    """Compile by our own rules: one source several times, each for another instruction set."""

    def run(self) -> None:
        try:
            build.build(Path(self.get_ext_fullpath(LIBRARY)))
        except build.BuildError as error:
            print(build.warning(error), file=sys.stderr)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_outputs(self) -> list[str]:
        path = self.get_ext_fullpath(LIBRARY)
        return [path] if not self.inplace and Path(path).exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # in place it is built in place


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not Path(self.bdist_dir or "", *LIBRARY.split(".")).with_suffix(".so").exists()
        return "py3", "none", super().get_tag()[2]


relative = [path.relative_to(HERE).as_posix() for path in build.sources()]
setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            LIBRARY,
            sources=[path for path in relative if path.endswith(".cpp")],
            depends=[path for path in relative if path.endswith(".h")],
            optional=True,
        )
    ],
)
