"""Builds shardcomm._C and libshardcomm with CMake. Everything else about the package stands in pyproject.toml."""

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
        # One folder for all kinds of build, so that a wheel after an editable install compiles nothing anew.
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        architectures = os.environ.get("CUDAARCHS")
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
                # CMake itself would keep, in its cache, those of the folder's first build.
                f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"
                if architectures
                else "-UCMAKE_CUDA_ARCHITECTURES",
                f"-DCMAKE_COMPILE_WARNING_AS_ERROR={os.environ.get('SHARDCOMM_WERROR', 'off')}",
                "-DSHARDCOMM_PYTHON=ON",
                "-DSHARDCOMM_TESTS=OFF",  # which bench/played_cuda.py turns on
                "-DCMAKE_INSTALL_LIBDIR=lib",
            ],
            check=True,
        )
        subprocess.run(["cmake", "--build", build], check=True)
        for component, folder in {
            "python": target,
            "library": ROOT / "shardcomm" if self.editable_mode else target,
        }.items():
            command = ["cmake", "--install", build, "--prefix", folder, "--component", component]
            subprocess.run(command, check=True)


setup(ext_modules=[Extension("shardcomm._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
