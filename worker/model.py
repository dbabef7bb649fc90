"""Loading a ``transformers`` model for paged serving. Owns the weights and what is known of the model; no KV."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kernels.contract import Geometry, LayerAttention
from kernels.cpu.decoder import DecoderWeights
from kernels.cpu.library import Library
from observability.startup import start_up
from shared.lifecycle import StartupError
from worker import attention, decoder, decoder_trial, experts, lora
from worker.admissible import TrialPass, check_config, rope_limit
from worker.fingerprint import fingerprint
from worker.linear import MIN_ROWS, can_pack, pack_linears
from worker.lora_files import Adapter, check_fits, read_adapter
from worker.parallel.ranks import mine
from worker.parallel.sharding import divide, take_part
from worker.row_widths import RowWidths

log = logging.getLogger("headrace.worker.model")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """A model whose whole forward pass the C++ library runs."""

    weights: DecoderWeights
    rotations: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # cos and sin of so many positions

    @property
    def quantized(self) -> bool:
        return bool(self.weights.head.struct.format)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    module: Any  # a transformers ...ForCausalLM; None where ``native`` has its weights, and no adapter needs it
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
    native: Native | None = None
    adapters: tuple[str, ...] = ()  # LoRA adapters, which the module runs
    weights: str = ""  # their fingerprint; empty: they are divided over ranks
    adapter_weights: tuple[str, ...] = ()  # the adapters'

    def describe(self, kernel: str, threads: int) -> str:
        """The line printed at start: what runs it, in which type."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.device.type != "cpu":
            return f"{dtype} on {self.device}, module by module, {kernel} attention"
        how = "module by module"
        if self.native is not None:
            how = "one C++ call a step" + (", weights in int8" if self.native.quantized else "")
            how += ", rows with LoRA adapters module by module" if self.adapters else ""
        return f"{dtype} on the CPU, {threads} thread{'' if threads == 1 else 's'}, {how}, {kernel} attention"

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """``[T]`` ids and positions to the logits ``[len(keep), vocab_size]`` of the rows in ``keep``.

        Attention is answered by what :func:`worker.attention.answering` has installed.
        """
        out = self.module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        return out.logits[0, :, : self.vocab_size]  # type: ignore[no-any-return]

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """A pass that wants no logits: it only fills the KV cache."""
        self.module.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)


def load_model(
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    library: Library | None = None,
    block_size: int = 16,
    quantize: str = "none",
    adapters: Mapping[str, str] | None = None,
) -> LoadedModel:
    """Load ``model``, a local folder or a Hugging Face id (from the local cache, else downloaded).

    Weights come from safetensors only, and no code of the model's repository is run. ``dtype`` is ``auto`` (bfloat16
    on a GPU and on a CPU that multiplies it, else float32) or a name in ``DTYPES``; ``device`` is ``auto``, ``cpu`` or
    ``cuda``. With a ``library``, a model of the shape that it knows runs there, over pages of ``block_size`` tokens,
    with its weights in int8 if ``quantize`` says so. ``adapters``: folders of LoRA adapters by name; rows that have one
    run module by module, over the same weights. Raises StartupError, one line, for whatever can't be loaded or served.
    """
    transformers.utils.logging.disable_progress_bar()
    attention.register()
    experts.register()
    target = device_of(device)
    if quantize not in ("none", "int8"):
        raise StartupError(f"model {model!r} can't be quantised to {quantize} here: a CPU has int8")
    config = read_config(model)
    check_config(model, config)
    kind = dtype_of(dtype, target, library)
    tuned = [read_adapter(name, path, kind) for name, path in (adapters or {}).items()]
    module = read_weights(model, config, kind)
    module.to(target)
    module.eval().requires_grad_(False)
    check_fits(module, tuned)
    weights = fingerprint(module.named_parameters(), quantize) if mine() is None else ""
    start_up.ended("weights")
    reason, tried = _not_native(model, module, kind, target, library, block_size)
    if reason and quantize != "none":
        raise StartupError(f"model {model!r} can't be quantised to {quantize} here: {reason}")
    if reason and can_pack(kind, target):
        pack_linears(module)
        experts.pack_experts(module)
    trial, widths = tried if tried is not None and not reason else run_trial(model, module, target)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    logits_width: int = config.get_text_config().vocab_size
    heads, kv_heads, head_dim = next(iter(trial.shapes))
    limit = most_positions(config)
    eos_token_ids = end_tokens(module)
    native = None
    if not reason and library is not None:
        native, reason = _native(
            library, module, Geometry(heads, kv_heads, head_dim, block_size), trial, kind, quantize, limit
        )
        if native is None and quantize != "none":
            raise StartupError(f"model {model!r} can't be quantised to {quantize} here: {reason}")
        if native is None:  # its weights are gone: once more, for the other way
            log.info("%s runs module by module: %s", model, reason)
            return load_model(model, dtype, device, None, block_size, adapters=adapters)
        if not tuned:
            module = None
    elif library is not None:
        log.info("%s runs module by module: %s", model, reason)
    _install_adapters(model, module, tuned, target)
    return LoadedModel(
        module=module,
        layers=trial.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=limit,
        eos_token_ids=eos_token_ids,
        row_widths=frozenset(widths - {logits_width}),
        logits_capped=logits_width in widths,
        dtype=kind,
        device=target,
        native=native,
        adapters=tuple(adapter.name for adapter in tuned),
        weights=weights,
        adapter_weights=tuple(adapter.fingerprint for adapter in tuned),
    )


def _install_adapters(model: str, module: Any, adapters: list[Adapter], device: torch.device) -> None:
    """Raises StartupError where one can't be run."""
    if not adapters:
        return
    lora.install(module, adapters, device)
    for adapter in adapters:
        with lora.running(lora.AdapterRows.all_of(adapter.name, MIN_ROWS, device)):
            run_trial(model, module, device)


def _not_native(
    model: str, module: Any, dtype: torch.dtype, device: torch.device, library: Library | None, block_size: int
) -> tuple[str, tuple[TrialPass, set[int]] | None]:
    """Why the C++ library can't run the model, empty if it seems that it can; and the module's trial pass as it is."""
    if library is None:
        return "there is no library", None
    if device.type != "cpu":
        return f"it runs on {device.type}", None
    if mine() is not None:
        return "it is divided over ranks", None
    tried = trial, _ = run_trial(model, module, device)
    try:
        geometry = Geometry(*next(iter(trial.shapes)), block_size)
        decoder.check(module, geometry, trial.layers, dtype)
        decoder_trial.check_cutting(library, module, geometry, trial.layers, most_positions(module.config))
    except decoder.NotThisShape as shape:
        return str(shape), tried
    return "", tried


def most_positions(config: Any) -> int | None:
    """The longest sequence that the model itself allows, if it says."""
    return min(filter(None, (getattr(config, "max_position_embeddings", None), rope_limit(config))), default=None)


def _native(
    library: Library,
    module: Any,
    geometry: Geometry,
    trial: TrialPass,
    dtype: torch.dtype,
    quantize: str,
    limit: int | None,
) -> tuple[Native | None, str]:
    """Hand the weights over, and see that a pass of the library says what one of the module says."""
    rotary = module.base_model.rotary_emb
    try:
        weights = decoder_trial.checked_weights(
            library, module, geometry, trial.layers, dtype, quantize == "int8", limit
        )
    except decoder.NotThisShape as shape:
        return None, str(shape)
    return Native(weights, lambda count: decoder.rotations(rotary, torch.arange(count), dtype)), ""


def device_of(device: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` means here. Raises StartupError."""
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


def read_config(model: str) -> PreTrainedConfig:
    """A model's config. Raises StartupError."""
    if not Path(model).exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise StartupError(f"model folder {model!r} does not exist")
    if Path(model).is_file():
        raise StartupError(f"model {model!r} is a file; 'headrace fetch-model {model}' makes a folder of a GGUF file")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise StartupError(f"model {model!r} can't be read: {_one_line(error)}") from None
    return config


def dtype_of(dtype: str, device: torch.device, library: Library | None) -> torch.dtype:
    """The type that ``auto`` or a name in ``DTYPES`` means. Raises StartupError."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise StartupError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    quick = device.type == "cuda" or (library is not None and library.isa == "avx512bf16")
    return torch.bfloat16 if quick else torch.float32


def read_weights(model: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """The model with its weights, on the CPU or straight on ``device``; a rank's part of it, where it is divided.

    Raises StartupError.
    """
    ranks = mine()
    division = None if ranks is None else divide(model, config, ranks.size)
    where = division.load_arguments() if division is not None else {"device_map": device and {"": device}}
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
            **where,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise StartupError(f"model {model!r} can't be loaded: {_one_line(error)}") from None
    module, report = loaded
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        what = missing[0] if missing else next(iter(report["mismatched_keys"]))
        raise StartupError(f"model {model!r} lacks weights that its config asks for, e.g. {what}")
    if ranks is not None and division is not None:
        take_part(module, division, ranks)
    return module


def run_trial(model: str, module: Any, device: torch.device) -> tuple[TrialPass, set[int]]:
    """What a pass of the model asks of attention, and its row widths (see :mod:`worker.row_widths`). Raises
    StartupError for a model that can't be served."""
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


def end_tokens(module: Any) -> list[int]:
    """What ends a generation: the generation config's word, else the config's."""
    for source in (module.generation_config, module.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return sorted({int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])})
    return []


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
