from Cython.Build import cythonize
from setuptools import Extension, setup

setup(ext_modules=cythonize([Extension("rotoff._dp", ["rotoff/_dp.pyx"])], language_level=3))
