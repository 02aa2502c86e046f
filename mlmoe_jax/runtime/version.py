"""The version of the package, read by the build, the public names, run folders and reports."""

__version__ = "0.1.0"
