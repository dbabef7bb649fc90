"""Attention and cache kernels. Kept free of imports: ``transformers`` looks for a package of this name (Hugging Face's
``kernels``) and may import this one in its place; that must cost nothing and break nothing."""
