"""Attention of equal-shaped query items to one tile of keys each: the arithmetic inside the torch reference."""

from __future__ import annotations

import torch

from kernels.elementwise import elementwise


def attend_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` ``[P, H, rows, D]``; ``key``, ``value`` ``[P, H, tile, D]``; additive ``mask`` ``[P, 1, rows, tile]``.

    Returns the softmax-weighted values ``[P, H, rows, D]`` and the log-sum-exp of the scores ``[P, H, rows]`` (float32,
    or float64 for float64). For a row whose mask is all ``-inf`` the values are zeros and the log-sum-exp is undefined.
    """
    if softcap is None and query.device.type == "cpu":
        # The kernel behind scaled_dot_product_attention, called directly because it also returns the log-sum-exp.
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scaling
        )
        return output, log_sum
    return _attend_in_steps(query, key, value, mask, scaling, softcap)


def _attend_in_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(exact), key.to(exact).transpose(2, 3)).mul_(scaling)
    if softcap is not None:
        scores = elementwise(torch.tanh_, scores.div_(softcap)).mul_(softcap)
    scores.add_(mask)
    top = scores.amax(dim=-1, keepdim=True)
    top.masked_fill_(top == float("-inf"), 0.0)
    weights = elementwise(torch.exp_, scores.sub_(top))
    total = weights.sum(dim=-1, keepdim=True)
    output = torch.matmul(weights, value.to(exact)) / total.clamp_min(torch.finfo(exact).tiny)
    return output.to(query.dtype), (top + elementwise(torch.log, total)).squeeze(-1)
