"""Splitting a model over processes, by the tensor parallel plan that its class declares.

The plan (transformers' ``tp_plan``) names the linear layers whose rows or columns are split.  transformers' own
application of it makes every weight a DTensor, loads weights in its own way and splits neither tied heads nor more
processes than KV heads; here each process keeps plain parameters that are its slices of the full ones, so that
weights arrive, adapters merge and attention runs as with one process.  Shoeybi et al. 2019, "Megatron-LM", section 3:

    colwise   y_r = x W_r^T             each process has some of the outputs (heads, neurons)
    rowwise   y   = sum_r x_r W_r^T     and the next layer takes them as its inputs: one sum over all

Letters: N processes, r this one's rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.core.errors import ModelSourceError
from wingbeat.engines.embedded.probe import TESTED

COLUMNS = frozenset({"colwise"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
ROWS = frozenset({"rowwise"})
SPLITTING = frozenset({"rowwise_split_input"})
PACKED = frozenset({"packed_colwise"})
EXPERTS = frozenset({"moe_tp_experts"})
WHOLE = frozenset({"replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise"})
"""Kept by every process."""
STYLES = COLUMNS | GATHERED | ROWS | SPLITTING | PACKED | EXPERTS | WHOLE
KEY_VALUE = frozenset({"k_proj", "v_proj"})
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv"})
UNPLANNED = frozenset({"BitNetForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM"})
"""Of the architectures that the engine was tested with, those that cannot be split."""


@dataclass(frozen=True, slots=True)
class Part:
    """The ranges of one dimension of a full tensor that a process holds, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    total: int
    """Length of the full tensor along ``dim``, which is negative."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ModelSourceError where a tensor is not a full one of this model's."""
        if len(shape) < -self.dim or shape[self.dim] != self.total:
            raise ModelSourceError(
                f"{name}: expected {self.total} along dimension {self.dim}, got the shape {tuple(shape)}"
            )

    def of(self, full: Tensor) -> Tensor:
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


@dataclass(frozen=True, slots=True)
class Shards:
    """What one process holds of a split model."""

    rank: int
    size: int
    kv_parts: int
    """Different slices of the KV heads: N, or fewer where several processes hold the same heads."""
    parts: Mapping[str, Part] = field(default_factory=dict[str, Part])
    """By tensor name; tensors that are not named are held whole."""

    @property
    def kv_part(self) -> int:
        """Which of the slices this process holds."""
        return self.rank * self.kv_parts // self.size

    def kv_holders(self) -> list[int]:
        """One rank per slice."""
        return [part * self.size // self.kv_parts for part in range(self.kv_parts)]

    def local(self, name: str, full: Tensor) -> Tensor:
        """This process's slice of a full tensor of the model."""
        part = self.parts.get(name)
        if part is None:
            return full
        part.check(name, full.shape)
        return part.of(full)

    def local_adapter(self, module: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This process's slices of a LoRA pair on a linear layer: A [r, in], B [out, r]."""
        part = self.parts.get(f"{module}.weight")
        if part is None:
            return a, b
        part.check(f"the adapter of {module}", a.shape if part.dim == -1 else b.shape)
        return (part.of(a), b) if part.dim == -1 else (a, part.of(b))


def shard_model(model: PreTrainedModel, *, rank: int, size: int) -> Shards:
    """Cut a whole model down to what process ``rank`` of ``size`` holds, in place.

    torch.distributed's default group must span the processes by the time of the first forward pass.
    Raises ModelSourceError where the model has no plan, one that we cannot follow, or heads that do not divide.
    """
    plan = _plan_of(model)
    kv_parts = _checked_heads(model, plan, size)
    cutter = _Cutter(model, rank=rank, size=size, kv_parts=kv_parts)
    for name, style in plan.items():
        cutter.apply(name, style)
    return Shards(rank, size, kv_parts, cutter.parts)


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """The plan with one entry per module or parameter that exists."""
    name = type(model).__name__
    declared: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    known = f"architectures that were split in tests: {', '.join(name for name in TESTED if name not in UNPLANNED)}"
    if not any(style in COLUMNS | GATHERED for style in declared.values()):
        raise ModelSourceError(f"{name} declares no tensor parallel plan; set engine.tensor_parallel to 1 ({known})")
    unknown = {f"{key}: {style}" for key, style in declared.items() if style not in STYLES}
    fused = {key for key, style in declared.items() if style in COLUMNS and key.rpartition(".")[2] in FUSED}
    if unknown or fused:
        raise ModelSourceError(
            f"the tensor parallel plan of {name} has parts that cannot be followed"
            f" ({', '.join(sorted(unknown | fused))}); set engine.tensor_parallel to 1, or use vllm ({known})"
        )
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]
    matched = {n: style for n in names if (style := declared.get(re.sub(r"\.\d+(?=\.|$)", ".*", n))) is not None}
    return matched


def _checked_heads(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> int:
    """Into how many slices the KV heads are cut."""
    if not any(n.rpartition(".")[2] in KEY_VALUE and style in COLUMNS for n, style in plan.items()):
        return 1
    config: Any = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ModelSourceError(
            f"engine.tensor_parallel = {size} does not divide the heads of {type(model).__name__}: it has {heads} query"
            f" heads and {kv_heads} key/value heads; use a divisor of {heads} that divides {kv_heads} or is a multiple"
            " of it"
        )
    return min(size, kv_heads)


class _Cutter:
    """Applies one entry of a plan after the other."""

    def __init__(self, model: nn.Module, *, rank: int, size: int, kv_parts: int) -> None:
        self._model = model
        self._rank = rank
        self._size = size
        self._kv_parts = kv_parts
        embedding = cast("nn.Module | None", cast(Any, model).get_input_embeddings())
        self._tied = getattr(embedding, "weight", None)
        self._parameters = dict(model.named_parameters())
        self.parts: dict[str, Part] = {}

    def apply(self, name: str, style: str) -> None:
        if style in WHOLE:
            return
        if name in self._parameters:
            self._cut_parameter(name, style)
            return
        module: Any = self._model.get_submodule(name)
        if style in EXPERTS:
            _after(module, _summed)
        elif not isinstance(module, nn.Linear):
            raise ModelSourceError(f"the plan splits {name!r}, a {type(module).__name__}; only nn.Linear can be split")
        elif style in ROWS | SPLITTING:
            self._cut_rows(name, module, splits=style in SPLITTING)
        elif module.weight is self._tied:  # embeddings need all of it: a view of the slice computes the logits
            _replace_forward(module, self._tied_head(module))
        else:
            self._cut_columns(name, module, gathers=style in GATHERED)

    def _range(self, length: int, *, parts: int, part: int) -> tuple[int, int]:
        return part * length // parts, (part + 1) * length // parts

    def _cut_columns(self, name: str, module: nn.Linear, *, gathers: bool) -> None:
        total = module.out_features
        if name.rpartition(".")[2] in KEY_VALUE and not gathers:
            own = self._range(total, parts=self._kv_parts, part=self._rank * self._kv_parts // self._size)
        else:
            own = self._range(total, parts=self._size, part=self._rank)
        self._cut(f"{name}.weight", module, "weight", Part(-2, (own,), total))
        if module.bias is not None:
            self._cut(f"{name}.bias", module, "bias", Part(-1, (own,), total))
        module.out_features = own[1] - own[0]
        if gathers:
            everywhere = not self._is_head(module)
            _after(module, self._gather(total, everywhere=everywhere))

    def _is_head(self, module: nn.Module) -> bool:
        return module is cast(Any, self._model).get_output_embeddings()

    def _tied_head(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        start, stop = self._range(module.out_features, parts=self._size, part=self._rank)
        gather = self._gather(module.out_features, everywhere=False)

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else module.bias[start:stop]
            return gather(F.linear(x, module.weight[start:stop], bias))

        return forward

    def _cut_rows(self, name: str, module: nn.Linear, *, splits: bool) -> None:
        own = self._range(module.in_features, parts=self._size, part=self._rank)
        self._cut(f"{name}.weight", module, "weight", Part(-1, (own,), module.in_features))
        module.in_features = own[1] - own[0]

        def forward(x: Tensor) -> Tensor:
            out = F.linear(x[..., own[0] : own[1]] if splits else x, module.weight)
            dist.all_reduce(out)
            return out if module.bias is None else out + module.bias

        _replace_forward(module, forward)

    def _cut_parameter(self, name: str, style: str) -> None:
        """A bare parameter [..., out, in], as mixture-of-experts layers have them."""
        owner, _, key = name.rpartition(".")
        parameter = self._parameters[name]
        if parameter.dim() < 2 or (style in PACKED and parameter.shape[-2] % 2):
            raise ModelSourceError(f"the plan splits the parameter {name!r} of shape {tuple(parameter.shape)}")
        if style in ROWS:
            total = parameter.shape[-1]
            part = Part(-1, (self._range(total, parts=self._size, part=self._rank),), total)
        elif style in PACKED:
            half = parameter.shape[-2] // 2
            start, stop = self._range(half, parts=self._size, part=self._rank)
            part = Part(-2, ((start, stop), (half + start, half + stop)), 2 * half)
        else:
            raise ModelSourceError(f"the plan splits the parameter {name!r} as {style!r}, which is not supported")
        self._cut(name, self._model.get_submodule(owner), key, part)

    def _cut(self, name: str, module: nn.Module, key: str, part: Part) -> None:
        full = cast(Tensor, getattr(module, key))
        setattr(module, key, nn.Parameter(part.of(full.detach()).clone(), requires_grad=False))
        self.parts[name] = part

    def _gather(self, total: int, *, everywhere: bool) -> Callable[[Tensor], Tensor]:
        """Outputs of all processes side by side, ``total`` wide; unless ``everywhere``, only rank 0 has them."""
        bounds = [self._range(total, parts=self._size, part=rank) for rank in range(self._size)]
        widths = [stop - start for start, stop in bounds]
        rank, width = self._rank, max(widths)

        def gather(out: Tensor) -> Tensor:
            padded = F.pad(out, (0, width - out.shape[-1])).contiguous()
            if not everywhere and rank != 0:
                dist.gather(padded, dst=0)
                return out
            found = [torch.empty_like(padded) for _ in widths]
            if everywhere:
                dist.all_gather(found, padded)
            else:
                dist.gather(padded, found, dst=0)
            return torch.cat([piece[..., :w] for piece, w in zip(found, widths, strict=True)], dim=-1)

        return gather


def _summed(out: Tensor) -> Tensor:
    dist.all_reduce(out)
    return out


def _after(module: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
    """What the module computes goes through ``then``."""
    before = cast(Any, module).forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return then(before(*args, **kwargs))

    _replace_forward(module, forward)


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    cast(Any, module).forward = forward


def gather_heads(own: Tensor, shards: Shards) -> Tensor | None:
    """All heads [K, ...] of a tensor whose first dimension is this process's heads; only rank 0 has them."""
    own = own.contiguous()
    if shards.rank:
        dist.gather(own, dst=0)
        return None
    found = [torch.empty_like(own) for _ in range(shards.size)]
    dist.gather(own, found, dst=0)
    return torch.cat([found[rank] for rank in shards.kv_holders()])


def spread_heads(full: Tensor, shards: Shards) -> Tensor:
    """This process's heads of a tensor that rank 0 fills; all give one of the same shape and dtype."""
    dist.broadcast(full, src=0)
    heads = full.shape[0] // shards.kv_parts
    return full[shards.kv_part * heads : (shards.kv_part + 1) * heads]
