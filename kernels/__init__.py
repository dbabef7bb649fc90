"""Attention and cache kernels, one contract for all. Kept light: ``transformers`` may import a package of this name."""
