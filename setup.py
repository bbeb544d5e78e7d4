"""The compiled part of the package; everything else is in pyproject.toml."""

import os
import sys
import sysconfig
from glob import glob

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

# A tool that makes a wheel asks for the metadata first and makes the sdist: these need no C.
COMPILES = not {"egg_info", "dist_info", "sdist"} & set(sys.argv)
CORES = min(len(kernels), os.cpu_count() or 1)

if __name__ == "__main__":  # not in the processes that Cython starts
    setup(
        ext_modules=cythonize(kernels, language_level=3, nthreads=CORES) if COMPILES else kernels,
        options={"build_ext": {"parallel": CORES}} | ({"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {}),
    )
