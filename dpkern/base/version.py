"""The version of dpkern: setuptools and CMake read it here."""

__version__ = "0.2.0.dev0"
