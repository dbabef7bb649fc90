"""The command line, the supervisor of ``headrace up``, and tools. The only package that may import several services."""

__version__ = "0.1.0"
