"""The one place that holds the version; setup.py, CMake and the package read it from here."""

__version__ = "0.1.0"
