"""A rank's part of a model, divided as the model's ``tp_plan`` in ``transformers`` says.

``transformers`` reads each rank's part of the weights alone (as tensors of ``torch.distributed.tensor``). Here they
become plain tensors in plain modules again, with hooks for what the ranks must tell one another: so whoever packs,
quantises or merges a model's layers finds in a divided one what it finds in a whole one, only narrower. After
Shoeybi et al., "Megatron-LM", 2019, section 3: two sums a layer, after the attention's and the MLP's last product.

Embeddings stay whole on each rank, which saves a sum; tied to one, the output layer takes its part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shared.lifecycle import StartupError
from worker.parallel.ranks import Ranks

_COLUMNS = "colwise"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_rep")
_ROWS_OF_WHOLE = "rowwise_split_input"
_SUMMED = "moe_tp_experts"
_DIVIDED_PARAMETERS = ("packed_colwise", "colwise", "rowwise")
_WHOLE = ("embedding_rowwise", "replicate", "replicated_with_grad_allreduce")
_KEPT_WHOLE = "replicate"  # the newer versions' word; older ones take what no rule names as whole

_KEY_VALUE = ("k_proj", "v_proj")
_ATTENTION = re.compile(r"attn|attention")


@dataclass(slots=True)
class Division:
    """How a model is divided. Modules are named as in the model, rules as in its plan (``*`` for a layer's number)."""

    size: int
    rules: dict[str, str]  # what transformers divides as it reads
    modules: dict[str, str] = field(default_factory=dict)  # the style of each module that has one
    kv_heads: int = 0  # not 0: fewer than ranks, so that several ranks have the same one
    head_module: str = ""  # the output layer, where it is read whole and cut here

    def load_arguments(self) -> dict[str, Any]:
        """For ``from_pretrained``, in place of a ``device_map``."""
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan=self.rules)}


def divide(name: str, config: PreTrainedConfig, size: int) -> Division:
    """How the model of ``config`` is divided over ``size`` ranks. Raises StartupError if it can't be."""
    transformers.utils.logging.set_verbosity_error()  # it warns of every layer that stays whole
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    refuse = _Refusal(name, config.model_type, size)
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not any(style in (*_ROWS, _ROWS_OF_WHOLE) for style in plan.values()):
        raise refuse("transformers has no tensor-parallel plan for it")
    division = Division(size, plan)
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    replicated = kv_heads < size and size % kv_heads == 0
    for module_name, module in model.named_modules():
        style = plan.get(_generic(module_name))
        if style is None:
            continue
        if _ATTENTION.search(module_name) and style == _COLUMNS:
            if heads % size:
                raise refuse(f"its {heads} attention heads can't be divided evenly")
            if kv_heads % size and not (replicated and module_name.endswith(_KEY_VALUE)):
                if not (replicated and module_name.endswith("q_proj")):
                    raise refuse(f"its {kv_heads} key/value heads can be neither divided nor repeated evenly")
            elif kv_heads % size:
                division.kv_heads = kv_heads
                style = _KEY_VALUE[0]
        division.modules[module_name] = style
        _check(module_name, module, style, size, refuse)
    for parameter_name, parameter in model.named_parameters():
        owner = parameter_name.rpartition(".")[0]
        style = plan.get(_generic(parameter_name))
        if style in _WHOLE:
            continue
        if style is not None and (owner not in division.modules or style not in _DIVIDED_PARAMETERS):
            raise refuse(f"its plan asks {style} of {parameter_name}, which Headrace does not know")
        dim, parts = {"packed_colwise": (-2, 2 * size), "colwise": (-2, size)}.get(style or "", (-1, size))
        if style in _DIVIDED_PARAMETERS and parameter.shape[dim] % parts:
            raise refuse(f"{parameter_name} of {tuple(parameter.shape)} can't be divided evenly")
    _keep_whole(model, division)
    return division


class _Refusal:
    def __init__(self, name: str, model_type: str, size: int) -> None:
        self._start = f"model {name!r} ({model_type}) can't be divided over {size} ranks"

    def __call__(self, reason: str) -> StartupError:
        return StartupError(f"{self._start}: {reason}")


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check(name: str, module: nn.Module, style: str, size: int, refuse: _Refusal) -> None:
    if style in _WHOLE or style == _SUMMED or style in _KEY_VALUE:
        return
    if not isinstance(module, nn.Linear) or style not in (_COLUMNS, *_GATHERED, *_ROWS, _ROWS_OF_WHOLE):
        raise refuse(f"its plan asks {style} of {name}, which Headrace does not know")
    width = module.in_features if style in (*_ROWS, _ROWS_OF_WHOLE) else module.out_features
    if width % size and not name.endswith("lm_head"):
        raise refuse(f"the {width} features of {name} can't be divided evenly")


def _keep_whole(model: Any, division: Division) -> None:
    """Take from the rules what each rank reads whole."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    whole = {_generic(name) for name, style in division.modules.items() if style in (*_WHOLE, *_KEY_VALUE)}
    embedding = model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    whole.add(names[embedding])
    output = model.get_output_embeddings()
    tied = output.weight is embedding.weight or bool(getattr(model.config, "tie_word_embeddings", False))
    if division.modules.get(names[output]) in _GATHERED and (tied or output.out_features % division.size):
        division.head_module = names[output]
        whole.add(names[output])
    division.modules = {name: style for name, style in division.modules.items() if style not in _WHOLE}
    there = {_generic(name) for name, _ in (*model.named_modules(), *model.named_parameters())}  # others get warnings
    rules = {name: style for name, style in division.rules.items() if name in there - whole}
    if _KEPT_WHOLE in ALL_PARALLEL_STYLES:
        rules |= dict.fromkeys(whole, _KEPT_WHOLE)
    division.rules = rules


def take_part(model: Any, division: Division, ranks: Ranks) -> None:
    """Make of what :meth:`Division.load_arguments` has loaded plain modules that know the other ranks."""
    for name, part in model.named_modules():
        for key, parameter in list(part._parameters.items()):
            if hasattr(parameter, "to_local"):
                part._parameters[key] = nn.Parameter(parameter.to_local(), requires_grad=False)
        if part.__dict__.pop("_is_hooked", False):
            part.__dict__.pop("forward", None)  # transformers' own way of telling the others
        style = division.modules.get(name)
        if style is None:
            continue
        if style in _KEY_VALUE:
            _cut(part, ranks.rank * division.kv_heads // ranks.size, division.kv_heads)
        elif style in _GATHERED:
            width = part.out_features
            if name == division.head_module:
                _cut(part, ranks.rank, ranks.size)
            part.register_forward_hook(_Gather(ranks, width))
        elif style in (*_ROWS, _ROWS_OF_WHOLE):
            if ranks.rank:
                part._parameters["bias"] = None  # one rank's sum has it
            if style == _ROWS_OF_WHOLE:
                part.register_forward_pre_hook(_TakePart(ranks))
            part.register_forward_hook(_Sum(ranks))
        elif style == _SUMMED:
            part.register_forward_hook(_Sum(ranks))
        if isinstance(part, nn.Linear):
            part.in_features = part.weight.shape[1]
            if style not in _GATHERED:
                part.out_features = part.weight.shape[0]


def _cut(linear: Any, place: int, parts: int) -> None:
    """Leave a linear layer a copy of part ``place`` of its outputs; where they are no multiple, the last ends with
    zeros."""
    width = -(-linear.out_features // parts)
    for key in ("weight", "bias"):
        whole = linear._parameters.get(key)
        if whole is None:
            continue
        part = whole[place * width : (place + 1) * width]
        if len(part) < width:
            part = torch.cat([part, part.new_zeros((width - len(part), *part.shape[1:]))])
        linear._parameters[key] = nn.Parameter(part.clone(), requires_grad=False)


class _Gather:
    """A hook: of each rank's outputs, all."""

    def __init__(self, ranks: Ranks, width: int) -> None:
        self._ranks, self._width = ranks, width

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self._ranks.gather(output)[..., : self._width]


class _Sum:
    """A hook: of each rank's partial outputs, the sum."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_reduce(output)


class _TakePart:
    """A hook before a layer: of inputs that all ranks have, this rank's."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0]
        width = x.shape[-1] // self._ranks.size
        return (x[..., self._ranks.rank * width : (self._ranks.rank + 1) * width], *args[1:])
