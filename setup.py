"""Builds the host replay kernel, a plain C library that Python loads with ctypes; everything else is in pyproject.toml.

Environment: CXX names the compiler (default g++); STALLFREE_SANITIZE is passed on as -fsanitize=... for test builds
("address,undefined" or "thread").
"""

import os
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/stallfree/kernels/native")
SOURCES = {"replay.cpp": [], "pool.cpp": [], "queue.cpp": [], "driver_calls.cpp": [], "replay_portable.cpp": []}
if platform.machine() in ("x86_64", "AMD64"):
    # Each instruction path is compiled for its own processors; replay.cpp asks the processor before it enters one.
    SOURCES["replay_avx2.cpp"] = ["-mavx2", "-mfma", "-mf16c"]
    SOURCES["replay_avx512.cpp"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
    # GCC's own AVX-512 header warns about the values that its intrinsics leave undefined on purpose.
    SOURCES["replay_avx512.cpp"] += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# No contraction: a multiplication and an addition become one FMA where the source says so and nowhere else, so that every
# element of a vector, a tail or a path gets the same roundings.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-pthread",
]


class BuildNative(build_ext):
    """Compiles a shared library that does not depend on the Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        sanitize = os.environ.get("STALLFREE_SANITIZE")
        flags = [*FLAGS, f"-fsanitize={sanitize}", "-O1", "-g", "-fno-omit-frame-pointer"] if sanitize else FLAGS
        objects_dir = Path(self.build_temp) / "native"
        objects_dir.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            target = str(objects_dir / source.replace(".cpp", ".o"))
            run([*compiler, *flags, *SOURCES[source], "-c", str(NATIVE / source), "-o", target])
            return target

        with ThreadPoolExecutor() as workers:
            objects = list(workers.map(compile_one, SOURCES))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run([*compiler, *flags, "-shared", *objects, "-o", str(library)])


class PlatformWheel(bdist_wheel):
    """The library runs under any Python 3 of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"stallfree needs a C++17 compiler and found no {command[0]!r}: install g++ (Debian: apt-get install g++) "
            "or set CXX to the compiler you have."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"stallfree's replay kernel did not compile: {shlex.join(command)} exited {error.returncode}."
        ) from None


sources = [str(path) for path in sorted(NATIVE.glob("*.cpp"))]
headers = [str(path) for path in sorted(NATIVE.glob("*.h"))]
setup(
    ext_modules=[Extension("stallfree.kernels._replay", sources=sources, depends=headers)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
