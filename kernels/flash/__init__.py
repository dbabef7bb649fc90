"""Attention by flash-attn (generations 2, 3 and 4), beside another paged kernel that serves the rest. The libraries are
imported where they are to be called, and nowhere else."""
