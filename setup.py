"""The native library as a build step of its own; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CPU = Path("tilewise", "kernels", "cpu")

# Loaded by its path: importing tilewise would need NumPy, which is not there in an isolated build.
_spec = spec_from_file_location("engine_build", ROOT / CPU / "engine" / "build.py")
engine_build = module_from_spec(_spec)
_spec.loader.exec_module(engine_build)


class BuildEngine(Command):
    """A step of `build`, as setuptools describes them (setuptools.command.build.SubCommand)."""

    description = "compile the native library"
    user_options = ()
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        try:
            engine_build.install(self._folder())
        except engine_build.BuildError as failure:
            raise CompileError(f"Tilewise's native engine could not be built: {failure}") from failure

    def get_source_files(self) -> list[str]:
        """What a source distribution takes along."""
        engine = ROOT / CPU / "engine"
        return [str(p.relative_to(ROOT)) for p in sorted(engine.rglob("*")) if p.is_file() and p.suffix != ".pyc"]

    def get_outputs(self) -> list[str]:
        """The library, or the reason why there is none."""
        names = [name for name in (engine_build.LIBRARY, engine_build.REASON) if (self._folder() / name).exists()]
        return [str(Path(self.build_lib, CPU, name)) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        return {output: str(CPU / Path(output).name) for output in self.get_outputs()} if self.editable_mode else {}

    def _folder(self) -> Path:
        return ROOT / CPU if self.editable_mode else Path(self.build_lib, CPU)


class Build(build):
    sub_commands = [*build.sub_commands, ("build_engine", None)]  # noqa: RUF012 - setuptools reads it so


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """One wheel for all Python versions: the library is loaded with ctypes and knows nothing of Python."""
        platform = super().get_tag()[2]
        if sys.platform == "darwin" and not self.root_is_pure:
            platform = f"macosx_{engine_build.MACOS_TARGET}_{os.uname().machine}".replace(".", "_")
        return "py3", "none", platform


class TilewiseDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """A wheel with a library is for one platform; one that leaves it out on purpose is for all."""
        return not engine_build.is_set("TILEWISE_NO_ENGINE")


setup(
    distclass=TilewiseDistribution,
    cmdclass={"build": Build, "build_engine": BuildEngine, "bdist_wheel": Wheel},
)
