"""The compiled part of the package; everything else is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

# No -march=native: a wheel must run on other machines than the one that built it.
kernel = Extension("rotoff._dp", ["rotoff/_dp.pyx"], extra_compile_args=["-O3"])

setup(ext_modules=cythonize([kernel], language_level=3))
