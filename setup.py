"""Builds shardcomm._C with CMake. Everything else about the package stands in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        subprocess.run(
            [
                "cmake",
                "-G",
                "Ninja",
                "-S",
                ROOT,
                "-B",
                build,
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DSHARDCOMM_CUDA={os.environ.get('SHARDCOMM_CUDA', 'auto')}",
            ],
            check=True,
        )
        subprocess.run(["cmake", "--build", build], check=True)
        subprocess.run(["cmake", "--install", build, "--prefix", target], check=True)


setup(ext_modules=[Extension("shardcomm._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
