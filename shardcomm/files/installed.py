"""Where the C library is that comes with this package: for programs in C and C++, and for build systems."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def get_include() -> str:
    """The folder of `shardcomm.h` (C99) and `shardcomm.hpp` (C++17).

    Returns:
        The path, for a compiler's `-I`.

    Example:
        ```sh
        gcc -I$(python -c "import shardcomm; print(shardcomm.get_include())") -c program.c
        ```
    """
    return str(_existing("include"))


def get_library_dir() -> str:
    """The folder of `libshardcomm.so`, the library that `shardcomm.h` declares.

    Returns:
        The path, for a linker's `-L`.
    """
    return str(_existing("lib"))


def get_cmake_dir() -> str:
    """The folder for `-Dshardcomm_DIR=`, so that CMake's `find_package(shardcomm)` finds this package."""
    return str(_existing("lib") / "cmake" / "shardcomm")


def _existing(name: str) -> Path:
    folder = _PACKAGE / name
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not there: this build of shardcomm has no C library; install the package again"
        )
    return folder
