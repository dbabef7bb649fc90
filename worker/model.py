"""Loading a ``transformers`` model for paged serving. Owns the weights and what is known of the model; no KV."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kernels.contract import LayerAttention
from shared.lifecycle import StartupError
from worker import attention, experts
from worker.admissible import TrialPass, check_config, rope_limit
from worker.linear import MIN_ROWS, can_pack, pack_linears
from worker.row_widths import RowWidths

log = logging.getLogger("headrace.worker.model")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    module: Any  # a transformers ...ForCausalLM
    layers: list[LayerAttention]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding
    max_positions: int | None  # the longest sequence that the model itself allows
    eos_token_ids: list[int]
    row_widths: frozenset[int]  # of a pass's rows: see worker.row_widths
    logits_capped: bool  # whether such a function is applied to the logits too
    dtype: torch.dtype
    device: torch.device

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """``[T]`` ids and positions to the logits ``[len(keep), vocab_size]`` of the rows in ``keep``.

        Attention is answered by what :func:`worker.attention.answering` has installed.
        """
        out = self.module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        return out.logits[0, :, : self.vocab_size]  # type: ignore[no-any-return]

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """A pass that wants no logits: it only fills the KV cache."""
        self.module.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)


def load_model(model: str, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load ``model``, a local folder or a Hugging Face id (from the local cache, else downloaded).

    Weights come from safetensors only, and no code of the model's repository is run. ``dtype`` is ``auto`` (bfloat16
    on a GPU, float32 on a CPU) or a name in ``DTYPES``; ``device`` is ``auto``, ``cpu`` or ``cuda``. Raises
    StartupError, one line, for whatever can't be loaded or served.
    """
    transformers.utils.logging.disable_progress_bar()
    attention.register()
    experts.register()
    target = _device(device)
    config = _config(model)
    check_config(model, config)
    kind = _dtype(dtype, target)
    module = _weights(model, config, kind)
    module.to(target)
    module.eval().requires_grad_(False)
    if can_pack(kind, target):
        pack_linears(module)
        experts.pack_experts(module)
    trial, widths = _trial(model, module, target)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    logits_width = module.get_output_embeddings().out_features
    heads, kv_heads, head_dim = next(iter(trial.shapes))
    limits = [limit for limit in (getattr(config, "max_position_embeddings", None), rope_limit(config)) if limit]
    return LoadedModel(
        module=module,
        layers=trial.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=min(limits, default=None),
        eos_token_ids=_eos_token_ids(module),
        row_widths=frozenset(widths - {logits_width}),
        logits_capped=logits_width in widths,
        dtype=kind,
        device=target,
    )


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError:
        raise StartupError(f"device {device!r} is none of auto, cpu, cuda") from None
    if target.type not in ("cpu", "cuda"):
        raise StartupError(f"device {device!r} is none of auto, cpu, cuda")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("device 'cuda': no usable GPU (is this a CPU build of torch?)")
    return target


def _config(model: str) -> PreTrainedConfig:
    if not Path(model).exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise StartupError(f"model folder {model!r} does not exist")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise StartupError(f"model {model!r} can't be read: {_one_line(error)}") from None
    return config


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        if dtype not in DTYPES:
            raise StartupError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _weights(model: str, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=attention.ATTENTION_NAME,
            experts_implementation=experts.EXPERTS_NAME,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise StartupError(f"model {model!r} can't be loaded: {_one_line(error)}") from None
    module, report = loaded
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        what = missing[0] if missing else next(iter(report["mismatched_keys"]))
        raise StartupError(f"model {model!r} lacks weights that its config asks for, e.g. {what}")
    return module


def _trial(model: str, module: Any, device: torch.device) -> tuple[TrialPass, set[int]]:
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise StartupError(f"model {model!r} ({module.config.model_type}) can't be served: "
                           "its forward pass can't leave logits out (logits_to_keep)")  # fmt: skip
    trial = TrialPass(model, module.config)
    tokens = torch.zeros((1, MIN_ROWS), dtype=torch.int64, device=device)
    positions = torch.arange(MIN_ROWS, device=device)[None]
    with torch.inference_mode(), attention.answering(trial), RowWidths(MIN_ROWS) as seen:
        try:
            module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=positions[0])
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            if isinstance(error, StartupError):
                raise
            raise StartupError(f"model {model!r} ({module.config.model_type}) can't be served: a trial pass fails: "
                               f"{_one_line(error)}") from error  # fmt: skip
    trial.check()
    return trial, seen.widths


def _eos_token_ids(module: Any) -> list[int]:
    """What ends a generation: the generation config's word, else the config's."""
    for source in (module.generation_config, module.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return sorted({int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])})
    return []


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
