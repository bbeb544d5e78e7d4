"""The compiled part of the package; everything else is in pyproject.toml."""

import os
import re
import subprocess
import sys
import sysconfig
from glob import glob
from importlib.util import find_spec

from Cython.Build import cythonize
from setuptools import Extension, setup

# -O3 for the kernels' inner loops; -fno-math-errno changes no result. No -ffast-math: equal inputs give equal bits.
# No -march=native: a wheel must run on other machines than the one that built it. -g0: debug information takes a
# quarter of the time to compile and most of a wheel's bytes.
FLAGS = ["-O3", "-g0", "-fno-math-errno"]

# One wheel for CPython 3.11 and all later ones: typed memoryviews are in the stable ABI from 3.11 on, and the kernels
# are as fast with it. A build in place stays of one version, which Python would prefer to the other anyway.
STABLE = "bdist_wheel" in sys.argv and sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

kernels = [
    Extension(
        path[:-4].replace("/", "."),
        [path],
        extra_compile_args=FLAGS,
        py_limited_api=STABLE,
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
    )
    for path in sorted(glob("rotoff/**/*.pyx", recursive=True))
]

FIND_TORCH = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
TAPES = {(2, 13)}  # the versions of torch for which the compiled tape was tried; others have the one in Python


def folder_of_torch() -> str:
    """Return where torch is: ROTOFF_TORCH, this interpreter's, or what it has outside of pip's isolated build."""
    if "ROTOFF_TORCH" in os.environ:
        return os.environ["ROTOFF_TORCH"]
    if (spec := find_spec("torch")) is not None and spec.submodule_search_locations:
        return spec.submodule_search_locations[0]
    return subprocess.run([sys.executable, "-I", "-c", FIND_TORCH], capture_output=True, text=True).stdout.strip()


def tape_kernels() -> list[Extension]:
    """Return the compiled tape for the torch that is there. It is of the limited API: one file for all Pythons with a
    GIL, and one for each minor version of torch. Where it cannot be built, the tape in Python runs."""
    folder = folder_of_torch()
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            found = re.search(r"__version__ = '(\d+)\.(\d+)", file.read())
    except OSError:
        found = None
    version = (int(found[1]), int(found[2])) if found else ()
    if version not in TAPES or sysconfig.get_config_var("Py_GIL_DISABLED"):
        print(f"no tape is compiled: torch {'.'.join(map(str, version)) or 'was not found'}, needed is one of {TAPES}")
        return []
    headers = sorted(glob("rotoff/tape/*.h"))
    return [
        Extension(
            "rotoff.tape._kernel_torch{}{}".format(*version),
            ["rotoff/tape/_kernel.cpp"],
            depends=headers,
            include_dirs=[os.path.join(folder, "include")],
            library_dirs=[os.path.join(folder, "lib")],
            libraries=["torch_python", "torch_cpu", "c10"],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
            extra_link_args=["-Wl,-s"],
            py_limited_api=True,
            language="c++",
            optional=True,
        )
    ]


# A tool that makes a wheel asks for the metadata first and makes the sdist: these need no C.
COMPILES = not {"egg_info", "dist_info", "sdist"} & set(sys.argv)
CORES = min(len(kernels), os.cpu_count() or 1)

if __name__ == "__main__":  # not in the processes that Cython starts
    setup(
        ext_modules=cythonize(kernels, language_level=3, nthreads=CORES) + tape_kernels() if COMPILES else kernels,
        options={"build_ext": {"parallel": CORES}} | ({"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {}),
    )
