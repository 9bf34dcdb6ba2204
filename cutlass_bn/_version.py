"""The version, in the one place that Python, CMake and the packaging metadata read it from."""

__version__ = "0.1.0"
