"""The compiled part of the package; everything else is in pyproject.toml."""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

# -O3 for the kernels' inner loops; -fno-math-errno changes no result. No -ffast-math: equal inputs give equal bits.
# No -march=native: a wheel must run on other machines than the one that built it.
FLAGS = ["-O3", "-fno-math-errno"]

kernels = [
    Extension(path[:-4].replace("/", "."), [path], extra_compile_args=FLAGS)
    for path in sorted(glob("rotoff/**/*.pyx", recursive=True))
]

setup(ext_modules=cythonize(kernels, language_level=3))
