"""Tensor parallelism: one model divided over the GPUs of a machine, a process for each.

Rank 0 is the worker that the mesh knows. It starts the others (*followers*) as child processes and hands every plan on
to them once it is sure to run it. Each rank keeps a batch of its own, runs the same steps on its part of the weights
and of the key/value heads, and samples from the same logits; tokens are compared, not sent.
"""
