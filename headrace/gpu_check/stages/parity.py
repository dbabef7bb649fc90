"""Greedy tokens of the whole path (core, step loop, runner, kernels) against ``transformers``' own ``generate``.

Equal, or first different where the reference can't tell the two best tokens apart: in float32 where its logits, in
float64, are closer than 1e-3. In the type that is served, each token is held against the float64 logits behind the very
tokens before it: it must be the best, or nearer to it than the type's rounding.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from headrace.bench.workload import Shot
from headrace.gpu_check.one_process import OneProcess
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.runners import made
from headrace.gpu_check.shapes import SMALL, TINY, Shape
from scheduler.core.limits import Limits
from worker.attention import ATTENTION_NAME
from worker.device.load import random_model
from worker.lora_files import Adapter, LowRank

NEAR_TIE = 1e-3
ROUNDING = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: NEAR_TIE}
"""Of logits of a size of about 3, after some layers in the type."""

ADAPTER_RANK = 8
STD = 0.06
"""Of the weights, about ``hidden ** -0.5``."""


@dataclass
class Compared:
    tokens: int = 0
    equal: int = 0  # sequences
    ties: int = 0  # sequences that differ from a near tie on
    wrong: int = 0
    gap: float = float("inf")  # the smallest between the reference's two best, where a sequence differed
    detail: str = ""


def run(rig: Rig) -> None:
    shape = TINY if rig.rehearsal else SMALL
    plain = torch.float64 if rig.rehearsal else torch.float32
    weights = random_model(shape.config(), plain, rig.device)
    spread(weights)
    reference = _copy(weights, plain, "sdpa")
    shots = _shots(rig, shape.sizes.vocab_size)
    rig.progress("generate of transformers")
    wanted = [_generated(reference, shot) for shot in shots]
    paths: list[tuple[str, torch.dtype, dict[str, Any]]] = [
        ("graphs", plain, {}),
    ]
    if not rig.rehearsal:
        paths += [
            ("graphs", rig.dtype, {}),
            ("without graphs", plain, {"graphs": False}),
            ("batch-invariant", plain, {"batch_invariant": True}),
        ]
    for name, dtype, options in paths:
        label = f"{name}, {str(dtype).removeprefix('torch.')}"
        if not rig.more(f"{label} was compared"):
            return
        rig.progress(label)
        got = _served(rig, shape, _copy(weights, dtype, ATTENTION_NAME), shots, options)
        exact = _copy(_copy(weights, dtype, "eager"), torch.float64, "eager")  # of the weights as they are rounded
        found = _against(exact, shots, wanted, got) if dtype == plain else _behind(exact, shots, got, dtype)
        note = "against float64, token by token" if dtype != plain else ""
        rig.row(
            path=label, sequences=len(shots), tokens=found.tokens, equal=found.equal, ties=found.ties, note=note,
            **({"gap": found.gap} if found.ties else {}),
        )  # fmt: skip
        rig.check(label, not found.wrong and found.tokens > 0, found.detail)
    _with_adapters(rig, shape, weights, shots)


def _with_adapters(rig: Rig, shape: Shape, weights: Any, shots: Sequence[Shot]) -> None:
    """Requests with LoRA adapters, each in turn with another or with none, against models that have them merged in."""
    dtype = weights.dtype
    label = f"LoRA adapters, {str(dtype).removeprefix('torch.')}"
    if not rig.more(f"{label} was compared"):
        return
    rig.progress(label)
    adapters = [_random_adapter(weights, name) for name in ("one", "two")]
    got = _served(rig, shape, _copy(weights, dtype, ATTENTION_NAME), shots, {"adapters": adapters}, ["", "one", "two"])
    all_found = Compared()
    for place, adapter in enumerate([None, *adapters]):
        merged = _merged(_copy(weights, dtype, "sdpa"), adapter)
        exact = _merged(_copy(weights, torch.float64, "eager"), adapter)
        mine = shots[place::3]
        found = _against(exact, mine, [_generated(merged, shot) for shot in mine], got[place::3])
        all_found = Compared(
            all_found.tokens + found.tokens, all_found.equal + found.equal, all_found.ties + found.ties,
            all_found.wrong + found.wrong, min(all_found.gap, found.gap), found.detail or all_found.detail,
        )  # fmt: skip
    rig.row(
        path=label, sequences=len(shots), tokens=all_found.tokens, equal=all_found.equal, ties=all_found.ties, note="",
        **({"gap": all_found.gap} if all_found.ties else {}),
    )  # fmt: skip
    rig.check(label, not all_found.wrong and all_found.tokens > 0, all_found.detail)


def _random_adapter(module: Any, name: str) -> Adapter:
    """Of every linear layer in the blocks, with changes of about a sixth of its weights."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    changes = {}
    for path, linear in module.named_modules():
        if isinstance(linear, torch.nn.Linear) and linear is not module.get_output_embeddings():
            down, up = (
                STD * torch.randn(shape, generator=generator, dtype=torch.float64).to(module.dtype)
                for shape in ((ADAPTER_RANK, linear.in_features), (linear.out_features, ADAPTER_RANK))
            )
            changes[path] = LowRank(down, up)
    return Adapter(name, changes)


def _merged(module: Any, adapter: Adapter | None) -> Any:
    """``module`` itself, changed for good."""
    with torch.no_grad():
        for path, change in adapter.changes.items() if adapter is not None else ():
            weight = module.get_submodule(path).weight
            weight += (change.up.double() @ change.down.double()).to(weight)
    return module


def _shots(rig: Rig, vocabulary: int) -> list[Shot]:
    """Prompts of one token up to several chunks, fresh ones each time; outputs of several lengths."""
    draw = random.Random()
    lengths = (1, 9, 40) if rig.rehearsal else (1, 2, 15, 16, 17, 33, 100, 255, 256, 300, 511, 700)
    outputs = (3, 5) if rig.rehearsal else (48, 33, 64)
    return [
        Shot(0.0, [draw.randrange(vocabulary) for _ in range(length)], outputs[index % len(outputs)])
        for index, length in enumerate(lengths)
    ]


@torch.inference_mode()
def _generated(module: Any, shot: Shot) -> list[int]:
    ids = torch.tensor([shot.prompt], device=module.device)
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=shot.max_tokens,
        min_new_tokens=shot.max_tokens, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(shot.prompt) :].tolist()  # type: ignore[no-any-return]


def spread(module: Any) -> None:
    """Weights so wide that greedy decoding does not fall into one repeated token at once."""
    generator = torch.Generator(module.device).manual_seed(17)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, STD, generator=generator)


def _copy(module: Any, dtype: torch.dtype, attention: str) -> Any:
    """The same weights in another type, behind another implementation of attention."""
    copied = copy.deepcopy(module).to(dtype)
    copied.set_attn_implementation(attention)
    return copied


def _served(
    rig: Rig, shape: Shape, module: Any, shots: Sequence[Shot], options: dict[str, Any], adapters: Sequence[str] = ()
) -> list[list[int]]:
    """All at once, in chunks that share steps with decodes, by the scheduler's own core; in turn with ``adapters``."""
    chunk = 16 if rig.rehearsal else 128
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=2 * chunk, prefill_chunk_limit=chunk)
    with (
        made(rig, shape, module=module, max_model_len=1024, num_blocks=800, **options) as model,
        closing(OneProcess(model.runner, limits, adapters=adapters)) as serving,
    ):
        serving.serve(shots, concurrency=len(shots))
        return [serving.tokens[f"check-{index}"] for index in range(len(shots))]


def _against(exact: Any, shots: Sequence[Shot], wanted: Sequence[list[int]], got: Sequence[list[int]]) -> Compared:
    found = Compared()
    for shot, one, other in zip(shots, wanted, got, strict=True):
        found.tokens += len(other)
        if one == other:
            found.equal += 1
            continue
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        best = _logits(exact, shot.prompt + one[:same])[-1].topk(2).values
        gap = float(best[0] - best[1])
        found.gap = min(found.gap, gap)
        if len(one) == len(other) and gap < NEAR_TIE:
            found.ties += 1
            continue
        found.wrong += 1
        found.detail = (
            f"{found.wrong} sequences differ; a prompt of {len(shot.prompt)} at token {same}, where the two best "
            f"logits are {gap:.2g} apart"
        )
    return found


def _behind(exact: Any, shots: Sequence[Shot], got: Sequence[list[int]], dtype: torch.dtype) -> Compared:
    """Each token against the float64 logits behind what the path itself said before it."""
    found = Compared()
    for shot, tokens in zip(shots, got, strict=True):
        logits = _logits(exact, shot.prompt + tokens[:-1])[len(shot.prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        best = logits.amax(dim=-1)
        short = float((best - chosen).max())
        allowed = ROUNDING[dtype] * float(best.abs().max())
        found.tokens += len(tokens)
        found.equal += short == 0
        found.ties += 0 < short <= allowed
        if short > 0:
            found.gap = min(found.gap, short)
        if short > allowed:
            found.wrong += 1
            found.detail = (
                f"a token of a prompt of {len(shot.prompt)} is {short:.3g} below the best, {allowed:.3g} allowed"
            )
    return found


@torch.inference_mode()
def _logits(exact: Any, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(tokens)], device=exact.device)
    return exact(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]
