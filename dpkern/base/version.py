"""The version of dpkern: setuptools and CMake read it here."""

__version__ = "0.1.0"
