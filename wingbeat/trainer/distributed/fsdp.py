"""FSDP2 behind the questions of :class:`~wingbeat.trainer.sharding.Sharding`.

Each process holds a part of every trained weight, of its gradient and of its moments, in at least float32; whole
weights are gathered in the dtype that is computed in.  When, ``reshard`` says:

``step``
    Once per update.  Forwards and backwards then need nobody: each process runs as many as it likes, walks trees
    depth first, and repeats what did not fit into memory.  Gradients are gathered here, not by FSDP, and at the end
    each is summed over the processes, which keep their parts.  Memory of a process: all weights, and all gradients in
    float32, plus its part of masters and moments.
``layer``
    Around each layer, in every forward and backward, whose gradients are summed at once.  All processes must run as
    many forwards: who has fewer adds empty ones.  Memory: its part of everything, plus a layer.

Losses are sums over tokens whose weights were fixed for the whole batch, so gradients are *summed* over processes,
never averaged, and how rows are dealt changes none of them.

Of torch only what it documents is used: who knows FSDP's own records of parameters breaks with its next release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from transformers.modeling_layers import GradientCheckpointingLayer

from wingbeat.core.errors import SetupError
from wingbeat.trainer.distributed.balance import RowCost
from wingbeat.trainer.distributed.shared_rows import SharedRows
from wingbeat.trainer.distributed.world import RankLost, World, agree
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.memory import DoesNotFit
from wingbeat.trainer.optimizer import LOW_PRECISION
from wingbeat.trainer.row_forwards import Forward
from wingbeat.trainer.sharding import Sharding

Reshard = Literal["step", "layer"]


class Fsdp(SharedRows):
    """Rows are dealt, and the weights of one model are sharded."""

    def __init__(self, world: World, *, reshard: Reshard) -> None:
        super().__init__(world, cost=lambda: self._row_cost)
        self._reshard = reshard
        self._row_cost = RowCost(1.0, 0.0)
        self._root: Any = None
        self._modules: list[FSDPModule] = []
        self._parts: dict[str, nn.Parameter] = {}
        """This process's part of each weight that trains, by its name in the root."""
        self._sums: dict[str, Tensor] = {}
        """Of ``step``: the gradients of whole weights that this process has gathered, in at least float32."""
        self._watched: dict[str, nn.Parameter] = {}
        """Of ``step``: the whole weights whose gradients are taken as they come."""
        self._logprobs: LogprobModel | None = None
        self.has_met = False
        """Whether the processes were asked if all can go on; before that each only loads and probes the model."""

    def replica(self) -> Sharding:
        return SharedRows(self._world, cost=self._cost)

    def attach(self, base: Any, *, logprobs: LogprobModel) -> None:
        """Also raises SetupError or UnavailableError where another process cannot: all call this, or complain."""
        self._row_cost = RowCost.of(base)
        frozen = {parameter for parameter in base.parameters() if not parameter.requires_grad}
        policy = self._precision(base, has_frozen=bool(frozen))
        layers = _layers(base)
        self.has_met = True
        agree(self._world)
        mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": policy,
            # Adapters are small; the weights that they adapt stay whole where they are used all the time.
            "ignored_params": frozen if self._reshard == "step" else None,
        }
        for layer in layers:
            _to_masters(layer)
            fully_shard(layer, reshard_after_forward=self._reshard == "layer", **options)
        _to_masters(base)
        self._root = _Whole(base)
        fully_shard(self._root, reshard_after_forward=False, **options)
        self._modules = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        sums_at_once = self._reshard == "layer"
        self._root.set_requires_gradient_sync(sums_at_once)
        self._root.set_reshard_after_backward(sums_at_once)
        # A weight that this process did not need (an expert that no token was sent to) is summed with the others.
        self._root.set_reduce_scatter_unused_params(sums_at_once)
        self._parts = {name: one for name, one in self._root.named_parameters() if one.requires_grad}
        self._logprobs = logprobs
        logprobs.around = self._root
        with torch.no_grad():
            self._root(self._nothing)  # FSDP finds its root in the first forward
        self.release()

    @property
    def walks(self) -> bool:
        return self._reshard == "step"

    def release(self) -> None:
        for module in self._modules:
            module.reshard()

    @contextmanager
    def running(self, *, gradient: bool) -> Iterator[None]:
        if self._reshard == "layer":
            try:
                yield
            except DoesNotFit as failure:
                raise RankLost(
                    f"a forward of {failure.size.num_tokens} tokens did not fit into the memory of rank "
                    f"{self._world.rank} ({failure}), and with trainer.reshard = 'layer' it cannot be tried again; "
                    "lower micro_batch_tokens, or switch gradient_checkpointing on",
                    exit_code=SetupError.exit_code,
                ) from failure
            return
        for module in self._modules:
            module.unshard()
        self._watch()
        yield from self.alike(self._forget)
        if gradient:
            self._sum_gradients()

    def matched(self, forwards: Iterable[Forward]) -> Iterable[Forward]:
        if self._reshard == "step":
            yield from forwards
            return
        mine = list(forwards)
        counts = [int.from_bytes(data, "little") for data in self._world.gather(len(mine).to_bytes(8, "little"))]
        yield from mine
        for _ in range(max(counts) - len(mine)):
            self._empty_forward()

    def local(self, parameter: nn.Parameter) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        return parameter.to_local().detach().requires_grad_()

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient, parameter.grad = parameter.grad, None
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def _precision(self, base: Any, *, has_frozen: bool) -> MixedPrecisionPolicy:
        """Masters are gathered in the dtype of the computation.  Raises SetupError where that is not one dtype."""
        found = {parameter.dtype for parameter in base.parameters() if parameter.requires_grad}
        if len(found) != 1:
            raise SetupError(
                f"trainer.processes: expected {type(base).__name__} to have trained weights of one dtype, got "
                f"{', '.join(sorted(map(str, found)))}; set dtype = 'float32', or train in one process"
            )
        dtype = found.pop()
        if dtype in LOW_PRECISION and not has_frozen:
            return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return MixedPrecisionPolicy(cast_forward_inputs=False)

    def _watch(self) -> None:
        """Take the gradients of whole weights as they come: FSDP would keep them where nobody may look."""
        for name, weight in self._root.named_parameters():
            # (adapters that are switched off for a reference require none)
            if weight.requires_grad and self._watched.get(name) is not weight:
                self._watched[name] = weight
                weight.register_post_accumulate_grad_hook(lambda finished, name=name: self._take(name, finished))

    def _take(self, name: str, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        if gradient is None:
            return
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.float() if gradient.dtype in LOW_PRECISION else gradient

    def _sum_gradients(self) -> None:
        """Leave the sum over all processes at each part.  All sum the same weights, whatever each of them needed."""
        self.release()
        for name, part in self._parts.items():
            assert isinstance(part, DTensor), "all that trains is sharded"
            own = self._sums.pop(name, None)
            if own is None:
                own = torch.zeros(part.shape, dtype=part.dtype, device=self._world.device)
            whole = DTensor.from_local(own, part.device_mesh, [Partial("sum")])
            part.grad = whole.redistribute(placements=part.placements)

    def _empty_forward(self) -> None:
        """One that changes no gradient, and makes FSDP do what it does in each."""
        found = self._root(self._nothing)
        if torch.is_grad_enabled():
            found.backward()

    def _nothing(self) -> Tensor:
        """A loss of zero that depends on every weight."""
        assert self._logprobs is not None
        model = self._logprobs.model
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self._world.device)
        hidden = self._logprobs.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return model.get_output_embeddings()(hidden).float().sum() * 0.0

    def _forget(self) -> None:
        """Give up a pass that failed half-way, its gradients included."""
        self._sums.clear()
        self._root.reset_iter_state()


class _Whole(nn.Module):
    """The module that FSDP takes for the root: its forward is whatever runs decoder and head."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, run: Callable[[], Any]) -> Any:
        found = run()
        return tuple(map(_own, found)) if isinstance(found, tuple) else _own(found)


def _layers(base: Any) -> Sequence[nn.Module]:
    """What is gathered by itself.  Raises SetupError where a model has no layers that transformers knows as such."""
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SetupError(
            f"trainer.processes: {type(base).__name__} has no layers that can be sharded; train in one process"
        )
    return layers


def _to_masters(module: nn.Module) -> None:
    """Trained weights of low precision become their float32 masters, see :mod:`wingbeat.trainer.optimizer`."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in LOW_PRECISION:
            parameter.data = parameter.data.float()


def _own(found: Tensor) -> Tensor:
    """FSDP hooks the outputs, and a hook on a view is lost if somebody writes to the view."""
    return found.clone() if found.requires_grad else found
