"""Kernels in Triton, for GPUs. Nothing outside this package imports triton, and nothing imports this package where no
GPU is used."""
