"""Headrace and other engines under the same load; ``benchmarks/peers.py`` is the command."""
