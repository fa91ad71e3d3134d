"""The C library as it is installed: what it exports, and programs that are built against it and not the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardcomm
from support.commands import command

SOURCES = Path(__file__).parents[2]
EXAMPLE = SOURCES / "examples" / "cpp"


def output_of(*command: object, cwd: Path) -> str:
    """What the command prints. The interpreter's own folder comes first on its path: there is its cmake."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build_with_cmake(sources: Path, folder: Path) -> None:
    found = command("--cmakedir", cwd=sources).stdout.strip()
    output_of("cmake", "-S", sources, "-B", folder, f"-Dshardcomm_DIR={found}", cwd=sources)
    output_of("cmake", "--build", folder, cwd=sources)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of examples/cpp, built as its CMakeLists.txt says."""
    folder = tmp_path_factory.mktemp("example")
    build_with_cmake(EXAMPLE, folder)
    return folder


def losses_of(text: str) -> list[str]:
    return re.findall(r"loss ([\d.]+)", text)


def test_only_the_c_interface_is_exported(tmp_path: Path) -> None:
    library = Path(shardcomm.get_library_dir()) / "libshardcomm.so.0"
    names = [
        line.split()[-1].partition("@")[0]
        for line in output_of("nm", "-D", "--defined-only", library, cwd=tmp_path).splitlines()
    ]
    header = (Path(shardcomm.get_include()) / "shardcomm.h").read_text()
    declared = re.findall(r"^SHC_API .*?(shc_\w+)\(", header, re.MULTILINE)
    assert sorted(names) == sorted([*declared, "SHARDCOMM_0"])


def test_a_library_that_was_closed_keeps_its_threads(tmp_path: Path) -> None:
    library = Path(shardcomm.get_library_dir()) / "libshardcomm.so.0"
    program = f"""
import _ctypes, ctypes
library = ctypes.CDLL("{library}")
assert library.shc_stream_create_thread(ctypes.byref(ctypes.c_void_p())) == 0
_ctypes.dlclose(library._handle)
print("{library.name}" in open("/proc/self/maps").read())
"""
    assert output_of(sys.executable, "-c", program, cwd=tmp_path) == "True\n"


@pytest.mark.slow
def test_the_example_trains_alike_on_any_number_of_ranks(example: Path) -> None:
    alone, two, three = (
        losses_of(output_of(example / "train_fork", n, cwd=example)) for n in (1, 2, 3)
    )
    assert alone == two == three
    assert float(alone[0]) > 1
    assert float(alone[-1]) < 0.1


@pytest.mark.slow
def test_the_example_trains_under_mpirun(example: Path) -> None:
    if not (example / "train_mpi").exists() or shutil.which("mpirun") is None:
        pytest.skip("needs: MPI for C++ (Debian: libopenmpi-dev openmpi-bin)")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    by_mpi = losses_of(output_of(*command, example / "train_mpi", cwd=example))
    assert by_mpi == losses_of(output_of(example / "train_fork", 2, cwd=example))


@pytest.mark.parametrize(
    ("page", "prints"),
    [("linking.md", ["2 4 6 1\n" * 2, "2 4 2 4\n"]), ("messages.md", ["0.5 from rank 1\n"])],
)
def test_the_programs_of_the_documentation_run(
    page: str, prints: list[str], tmp_path: Path
) -> None:
    text = (SOURCES / "docs" / page).read_text()
    programs = re.findall(r"```c\n(.*?)```", text, re.DOTALL)
    assert [run_c(program, tmp_path) for program in programs] == prints


def run_c(program: str, folder: Path) -> str:
    (folder / "program.c").write_text(program)
    library = shardcomm.get_library_dir()
    flags = [f"-I{shardcomm.get_include()}", f"-L{library}", "-lshardcomm", f"-Wl,-rpath,{library}"]
    output_of("gcc", "-std=gnu99", "-Wall", "-Werror", "program.c", *flags, cwd=folder)
    return output_of(folder / "a.out", cwd=folder)


@pytest.mark.parametrize(
    "compiler",
    [
        "gcc -std=c99",
        "gcc -std=c17 -Wc++-compat",
        "g++ -std=c++98",
        "g++ -std=c++20 -Wold-style-cast",
    ],
)
def test_the_header_compiles_without_a_warning(compiler: str, tmp_path: Path) -> None:
    header = Path(shardcomm.get_include()) / "shardcomm.h"
    macros = re.findall(r"define SHC_(\w+)_INIT\b", header.read_text())
    assert len(macros) == 7
    options = "".join(f"shc_{m.lower()} a{m} = SHC_{m}_INIT; (void)a{m}; " for m in macros)
    (tmp_path / "program").write_text(
        f"#include <shardcomm.h>\nint main(void) {{ {options}return 0; }}\n"
    )
    language = "c++" if compiler.startswith("g++") else "c"
    warnings = "-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Werror"
    output_of(*compiler.split(), *warnings.split(), f"-I{header.parent}", "-fsyntax-only",
              "-x", language, "program", cwd=tmp_path)  # fmt: skip


def test_the_cpp_program_of_the_documentation_builds_with_cmake_and_runs(tmp_path: Path) -> None:
    page = (SOURCES / "docs" / "linking.md").read_text()
    for language, name in (("cpp", "program.cpp"), ("cmake", "CMakeLists.txt")):
        (tmp_path / name).write_text(re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[0])
    build_with_cmake(tmp_path, tmp_path / "build")
    assert (
        output_of(tmp_path / "build" / "program", cwd=tmp_path)
        == "10 10 11 11\n20 20 21 21\n30 30 31 31\n"
    )


def test_pkg_config_knows_how_to_compile_and_link_a_c_program(tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs: pkg-config")
    (tmp_path / "program.c").write_text(
        "#include <shardcomm.h>\n#include <stdio.h>\n"
        'int main(void) { printf("%d %d", shc_version(), SHC_VERSION); return 0; }\n'
    )
    library = Path(shardcomm.get_library_dir())
    flags = output_of(
        "pkg-config", "--with-path", library / "pkgconfig", "--cflags", "--libs",
        "shardcomm", cwd=tmp_path,
    ).split()  # fmt: skip
    rpath = f"-Wl,-rpath,{library}"
    output_of(
        "gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "program.c", *flags, rpath, cwd=tmp_path
    )
    header, linked = output_of(tmp_path / "a.out", cwd=tmp_path).split()
    assert header == linked


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder of a project, configured, of which the sources of shardcomm are a part."""
    folder = tmp_path_factory.mktemp("parent")
    (folder / "program.cpp").touch()
    (folder / "CMakeLists.txt").write_text(f"""
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES CXX)
add_subdirectory("{SOURCES}" shardcomm)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE shardcomm::shardcomm)
""")
    output_of("cmake", "-G", "Ninja", "-S", ".", "-B", "build",
              "-DCMAKE_INSTALL_LIBDIR=lib/of-this-machine", cwd=folder)  # fmt: skip
    return folder / "build"


@pytest.mark.slow
def test_a_project_around_it_links_it_by_the_same_name_and_keeps_its_settings(parent: Path) -> None:
    cache = (parent / "CMakeCache.txt").read_text()
    assert "CMAKE_CUDA_ARCHITECTURES" not in cache  # shardcomm's are its own
    assert re.findall("CMAKE_BUILD_TYPE.*=(.*)", cache) == [""]


@pytest.mark.slow
def test_what_is_installed_without_python_has_no_folders_of_python_packages(parent: Path) -> None:
    installs = (parent / "shardcomm" / "cmake_install.cmake").read_text()
    assert "shardcomm.hpp" in installs
    assert re.findall("csrc/(?:jax|torch)", installs) == []


@pytest.mark.slow
def test_pkg_config_finds_the_prefix_from_any_library_folder(parent: Path, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs: pkg-config")
    installed = tmp_path / "lib" / "of-this-machine" / "pkgconfig"
    installed.mkdir(parents=True)
    shutil.copy(parent / "shardcomm" / "shardcomm.pc", installed)
    flags = output_of("pkg-config", "--with-path", installed, "--cflags", "shardcomm", cwd=tmp_path)
    assert Path(flags.strip().removeprefix("-I")).resolve() == tmp_path / "include"


def test_a_build_without_the_library_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardcomm.files.installed._PACKAGE", tmp_path)
    with pytest.raises(FileNotFoundError, match="this build of shardcomm has no C library"):
        shardcomm.get_library_dir()
