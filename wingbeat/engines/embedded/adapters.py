"""Many LoRA adapters over one base model, mixed in one forward pass.

Each adapted ``nn.Linear`` gets a forward hook that adds ``(x A^T) B^T alpha / r`` to its output, for each token with
its own adapter (Hu et al. 2021, "LoRA", eq. 3, unmerged).  The model's code and weights stay untouched, so every
adapter, and the base model itself, are served beside one another from one copy of the weights.

The adapters of a module lie side by side in two tensors, ``A`` [C, in] and ``B`` [C, out]: an adapter of rank r owns r
of the C columns, the same in every module, whatever the ranks of the others.  A step is planned once for all modules::

    tokens   a a a a a a a a a b c b . .        (. the base model)
    parts    [----- a alone -----]              many tokens of one adapter: its columns only
                               [b c b]          a few tokens each: the columns of b and c at once, and a mask
    nothing                          [. .]

A mask rather than a product with zero keeps adapters apart even where one overflows; one that is not finite is refused.

Letters: T tokens of a step, P tokens of a part, I inputs and O outputs of a module, C columns, R columns of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded.lora import adapter_pairs
from wingbeat.engines.embedded.probe import Passing

ALONE_TOKENS = 48
"""Tokens of one adapter in a step from which it is computed by itself: below, the further calls cost more."""
FIRST_COLUMNS = 64
PROBE_TOKENS = 16
Run = tuple[str, int]
"""So many tokens in a row of the adapter of this name."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A published LoRA."""

    tensors: Mapping[str, Tensor]
    """As PEFT names them."""
    info: AdapterInfo


@dataclass(frozen=True, slots=True)
class Columns:
    """Where an adapter lies."""

    start: int
    stop: int

    @property
    def rank(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens of a step and the columns that they need."""

    columns: slice
    tokens_P: Tensor | None
    """None: all tokens of the step, in order."""
    foreign_PR: Tensor | None
    """Which columns are of another adapter than the token's; None: none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step adds to each module."""

    parts: tuple[Part, ...] = ()
    head: tuple[Part, ...] = ()
    """To the head, which sees the tokens only whose logits are wanted."""


NOTHING = Plan()


class AdaptedLinear:
    """The adapters of one module, and its hook."""

    def __init__(self, module: nn.Linear, *, columns: int, inputs: Inputs) -> None:
        self.module = module
        self._inputs = inputs
        weight = module.weight
        # What PEFT computes adapters in: at least float32, whatever the base model's dtype.
        self._dtype = torch.promote_types(weight.dtype, torch.float32)
        self._a_CI = torch.zeros(columns, weight.shape[1], dtype=self._dtype, device=weight.device)
        self._b_CO = torch.zeros(columns, weight.shape[0], dtype=self._dtype, device=weight.device)
        self.parts: Sequence[Part] = ()
        """Of the step under way."""
        module.register_forward_hook(self._add)

    def grow(self, columns: int) -> None:
        """Have so many columns."""
        self._a_CI, self._b_CO = (_longer(tensor, columns) for tensor in (self._a_CI, self._b_CO))

    def write(self, columns: slice, pair: tuple[Tensor, Tensor] | None) -> None:
        """Fill an adapter's columns; with zeros where it leaves this module alone."""
        if pair is None:
            self._a_CI[columns] = 0
            self._b_CO[columns] = 0
            return
        self._a_CI[columns] = pair[0].to(self._a_CI)
        self._b_CO[columns] = pair[1].T.to(self._b_CO)

    def _add(self, _module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not self.parts:
            return None
        y_TO = output.flatten(0, -2)  # fresh from the layer, so it may be written to
        for part, x_PI in zip(self.parts, self._inputs.of(inputs[0], self.parts, dtype=self._dtype), strict=True):
            inner_PR = x_PI @ self._a_CI[part.columns].T
            if part.foreign_PR is not None:
                inner_PR.masked_fill_(part.foreign_PR, 0.0)
            y_PO = y_TO if part.tokens_P is None else y_TO[part.tokens_P]
            if y_PO.dtype is self._dtype:
                y_PO.addmm_(inner_PR, self._b_CO[part.columns])
            else:  # added in float32 and rounded once
                y_PO.add_(inner_PR @ self._b_CO[part.columns])
            if part.tokens_P is not None:
                y_TO[part.tokens_P] = y_PO
        return y_TO.view(output.shape)


class Inputs:
    """What the last adapted module was given, by part: several modules (query, key and value) are given the same."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Sequence[Part]] | None = None
        self._found: list[Tensor] = []

    def of(self, x: Tensor, parts: Sequence[Part], *, dtype: torch.dtype) -> list[Tensor]:
        """The tokens [P, I] of each part."""
        if self._given is None or self._given[0] is not x or self._given[1] is not parts:
            x_TI = x.flatten(0, -2)
            self._given = (x, parts)
            self._found = [(x_TI if p.tokens_P is None else x_TI[p.tokens_P]).to(dtype) for p in parts]
        return self._found

    def forget(self) -> None:
        """The step is over."""
        self._given, self._found = None, []


class AdapterBank:
    """The adapters that ``model`` can be run with; changed between forwards only.

    ``model`` attends through the embedded engine's interface.
    """

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        self._model = cast(Any, model)
        self._device = device
        self._modules: dict[str, AdaptedLinear] = {}
        self._inputs = Inputs()
        self._columns: dict[str, Columns | None] = {}
        """By adapter; None for one that adds nothing."""
        self._capacity = 0
        self._last: tuple[list[Run], list[int], Plan] | None = None
        """Steps that decode the same requests are planned alike."""

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @torch.inference_mode()
    def put(self, name: str, weights: AdapterWeights | None) -> None:
        """Add an adapter, or give the one of this name other weights; None is one that adds nothing.

        The others stay as they are.  Raises ModelSourceError on tensors that are not a LoRA of that rank of this
        model's linear layers, or are not finite; nothing has changed then.
        """
        if weights is None:
            self._columns[name] = self._last = None
            return
        info = weights.info
        scale = info.alpha / info.rank
        found = adapter_pairs(self._model, weights.tensors, adapter=info)
        pairs = {
            module: (a, b.to(torch.promote_types(b.dtype, torch.float32)) * scale) for module, (a, b) in found.items()
        }
        infinite = [module for module, pair in pairs.items() if not all(bool(t.isfinite().all()) for t in pair)]
        if infinite:
            raise ModelSourceError(
                f"the adapter of {name!r} holds numbers that are not finite, in {len(infinite)} modules, first"
                f" {infinite[0]!r}: its policy has diverged; what was served before stays"
            )
        new = {module: self._model.get_submodule(module) for module in pairs if module not in self._modules}
        if new:
            _check_calls(self._model, new, device=self._device)
        self._last = None
        columns = self._place(name, info.rank)
        self._modules |= {
            module: AdaptedLinear(linear, columns=self._capacity, inputs=self._inputs) for module, linear in new.items()
        }
        for module, adapted in self._modules.items():
            adapted.write(slice(columns.start, columns.stop), pairs.get(module))

    def drop(self, name: str) -> None:
        """Forget an adapter; its columns are used again."""
        self._columns.pop(name, None)
        self._last = None

    @contextmanager
    def over(self, runs: Sequence[Run], *, kept: Sequence[int]) -> Iterator[None]:
        """Run the model so: ``runs`` in the order of the packed tokens, those named "" with the base model.

        ``kept`` are the places of the tokens whose logits are wanted.
        """
        plan = self._planned(list(runs), list(kept)) if self._modules else NOTHING
        if not plan.parts:
            yield
            return
        head = self._model.get_output_embeddings()
        try:
            for adapted in self._modules.values():
                adapted.parts = plan.head if adapted.module is head else plan.parts
            yield
        finally:
            self._inputs.forget()
            for adapted in self._modules.values():
                adapted.parts = ()

    def _place(self, name: str, rank: int) -> Columns:
        """Its columns: those that it has, if they are as many, or the first that are free."""
        before = self._columns.pop(name, None)
        if before is None or before.rank != rank:
            start = 0
            taken = [columns for columns in self._columns.values() if columns is not None]
            for other in sorted(taken, key=lambda columns: columns.start):
                if other.start - start >= rank:
                    break
                start = other.stop
            before = Columns(start, start + rank)
        while self._capacity < before.stop:
            self._capacity = max(FIRST_COLUMNS, 2 * self._capacity)
            for adapted in self._modules.values():
                adapted.grow(self._capacity)
        self._columns[name] = before
        return before

    def _planned(self, runs: list[Run], kept: list[int]) -> Plan:
        if self._last is not None and self._last[0] == runs and self._last[1] == kept:
            return self._last[2]
        found = {name: self._columns[name] for name, _ in runs if name}
        number = {name: i for i, name in enumerate(name for name, place in found.items() if place is not None)}
        which_T = np.repeat([number.get(name, -1) for name, _ in runs], [count for _, count in runs])
        columns = [place for place in found.values() if place is not None]
        plan = Plan(self._parts(which_T, columns), self._parts(which_T[kept], columns))
        self._last = (runs, kept, plan)
        return plan

    def _parts(self, which_T: NDArray[np.int64], columns: Sequence[Columns]) -> tuple[Part, ...]:
        """How tokens are computed whose adapters are ``columns[which]``, -1 for the base model."""
        counts = np.bincount(which_T[which_T >= 0], minlength=len(columns))
        alone = [int(i) for i in np.flatnonzero(counts >= ALONE_TOKENS)]
        few = [int(i) for i in np.flatnonzero((counts > 0) & (counts < ALONE_TOKENS))]
        if len(few) == 1:
            alone, few = [*alone, *few], []
        parts = [Part(slice(columns[i].start, columns[i].stop), self._places(which_T == i), None) for i in alone]
        if few:
            together_T = np.isin(which_T, few)
            start, stop = min(columns[i].start for i in few), max(columns[i].stop for i in few)
            owners_R = np.full(stop - start, -1)
            for i in few:
                owners_R[columns[i].start - start : columns[i].stop - start] = i
            foreign_PR = which_T[together_T][:, None] != owners_R
            parts.append(
                Part(slice(start, stop), self._places(together_T), torch.from_numpy(foreign_PR).to(self._device))
            )
        return tuple(parts)

    def _places(self, chosen_T: NDArray[np.bool_]) -> Tensor | None:
        return None if chosen_T.all() else torch.from_numpy(np.flatnonzero(chosen_T)).to(self._device)


def _longer(tensor: Tensor, length: int) -> Tensor:
    grown = tensor.new_zeros(length, tensor.shape[1])
    grown[: len(tensor)] = tensor
    return grown


def _check_calls(model: Any, modules: Mapping[str, nn.Module], *, device: torch.device) -> None:
    """Refuse modules that do not see all tokens of a step once, in order: experts, for example.

    Raises ModelSourceError, naming one.
    """
    head = model.get_output_embeddings()
    seen: dict[str, list[int]] = {name: [] for name in modules}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: seen[name].append(inputs[0].shape[-2])

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    places_1T = torch.arange(PROBE_TOKENS, device=device)[None]
    step = Passing()
    try:
        model(
            input_ids=places_1T % model.get_input_embeddings().num_embeddings,
            position_ids=places_1T,
            past_key_values=step,
            kv_step=step,
            use_cache=True,
            logits_to_keep=places_1T[0, :1],
        )
    finally:
        for hook in hooks:
            hook.remove()
    for name, module in modules.items():
        wanted = [1 if module is head else PROBE_TOKENS]
        if seen[name] != wanted:
            raise ModelSourceError(
                f"adapter targets {name!r}, which sees {seen[name]} of {PROBE_TOKENS} tokens in a forward, expected"
                f" {wanted}: it cannot be served beside others. Leave lora.group out, or choose other lora.targets"
            )
