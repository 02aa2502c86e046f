"""The version of the package. The build, `mlmoe_jax.__version__`, run folders and reports take it from here."""

__version__ = "0.1.0"
