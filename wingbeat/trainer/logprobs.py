"""Log-probabilities and entropies of chosen tokens without logits for all of them.

Logits are the largest tensor of training (tokens x vocabulary).  Here the decoder runs over the whole
micro-batch, only the hidden states that explain a trained token are gathered, and the head is applied
to ``chunk_tokens`` of them at a time; the backward pass computes each chunk's logits again
(:mod:`wingbeat.trainer.head`; a head that is more than a matrix product goes through torch's own checkpoints).

A token drawn under top-p, top-k or a grammar has the logprob of a distribution over its support alone, so
it is scored over the same support: at equal weights its ratio is then exactly 1.

Letters: ``B`` rows, ``T`` padded tokens, ``N`` trained tokens, ``C`` of them in a chunk, ``H`` hidden size,
``V`` vocabulary.

A worked instance: token ids ``[7, 8, 9]`` of which 8 and 9 were sampled have targets ``[8, 9]`` and
sources ``[0, 1]``, because the logits at position ``t - 1`` explain the token at ``t``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wingbeat.core.errors import SetupError
from wingbeat.core.support import decode_support, listed_support
from wingbeat.trainer.architectures import TRAINED
from wingbeat.trainer.head import HeadTask, LogitTransform, is_plain, score_with_head
from wingbeat.trainer.sharding import whole_run

_PROBE_TOKENS = 8
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Allowed difference as a share of the largest value, of what is computed in one way."""
_PROBE_DISTANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Allowed distance of hidden states as a share of their norm, of what is computed in two ways.  In bfloat16, pretrained
models of 18 and 30 layers come to 0.043 and 0.054; where a token sees one too many, to 0.68 and 0.17."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the head scores, all [N]."""

    targets_N: Tensor
    temperatures_N: Tensor
    """The logits are divided by it."""
    supports_N: NDArray[np.int64]
    """Places in ``support_table``, -1 for the whole vocabulary."""
    support_table: tuple[bytes, ...] = ()
    """:mod:`wingbeat.core.support` blobs."""

    def __len__(self) -> int:
        return len(self.targets_N)

    def blobs(self, piece: slice) -> list[bytes]:
        """The supports of some of them, where they have any."""
        return [self.support_table[index] for index in self.supports_N[piece] if index >= 0]

    def take(self, places: NDArray[np.int64]) -> Targets:
        """Some of them, in the order of ``places``."""
        index = torch.from_numpy(places).to(self.targets_N.device)
        return Targets(
            targets_N=self.targets_N[index],
            temperatures_N=self.temperatures_N[index],
            supports_N=self.supports_N[places],
            support_table=self.support_table,
        )


class LogprobModel:
    """Scores tokens with a Hugging Face causal LM (for LoRA: the base model that holds the adapters).

    Construction proves on random tokens that decoder, head and logit transform together give the
    model's own logits, and refuses the model by name (SetupError) if not: a model that does something
    else to its logits would otherwise train on wrong probabilities.

    ``entropy_gradient`` gives entropies a gradient.  ``vocabulary`` is the number of logits of another model whose
    tokens this one scores: heads are padded to sizes of their own, so logits behind it are left out, and tokens
    that this model lacks are impossible (logprob -inf).
    """

    def __init__(
        self, model: Any, *, chunk_tokens: int, entropy_gradient: bool = False, vocabulary: int | None = None
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        # cuDNN's attention, which torch prefers on Hopper, plans anew for every shape, there and back, in a second or
        # so: micro-batches seldom have one shape twice.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._model = model
        self._entropy_gradient = entropy_gradient
        self._decoder = _decoder_of(model)
        self._transform = LogitTransform.of(model.config)
        self._chunk_tokens = chunk_tokens
        self._probe_head()
        self._vocabulary = vocabulary or self._vocabulary
        self._needs_mask = self._probe_padding()
        self.around: Callable[[Callable[[], Any]], Any] = whole_run
        """Runs one forward of decoder and head; weights that are sharded are gathered by it."""

    @property
    def model(self) -> Any:
        return self._model

    @property
    def decoder(self) -> nn.Module:
        """The module whose last hidden states :meth:`score` takes."""
        return self._decoder

    @property
    def vocabulary(self) -> int:
        """The number of logits."""
        return self._vocabulary

    @property
    def entropy_gradient(self) -> bool:
        """Whether entropies have a gradient."""
        return self._entropy_gradient

    def __call__(
        self, input_ids_BT: Tensor, *, attention_mask_BT: Tensor, rows_N: Tensor, sources_N: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy of its distribution, both [N], at least float32.

        Rows are padded on the right.  Target ``n`` is explained by the hidden state of row ``rows_N[n]`` at
        position ``sources_N[n]``.
        """
        mask_BT = attention_mask_BT if self._needs_mask else None
        return self.around(lambda: self.score(self._hidden(input_ids_BT, mask_BT)[rows_N, sources_N], targets))

    def score(self, hidden_NH: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [N] of the targets that these hidden states explain.

        Both are of the distribution over the target's support.  The entropy carries a gradient where that was
        asked for.
        """
        restricted_N = targets.supports_N >= 0
        if not restricted_N.any():
            return self._score_alike(hidden_NH, targets)
        # Chunks of one kind each, so that only those with supports pay for them.
        order = np.argsort(restricted_N, kind="stable")
        split = len(targets) - int(restricted_N.sum())
        parts = [
            self._score_alike(hidden_NH[torch.from_numpy(places).to(hidden_NH.device)], targets.take(places))
            for places in (order[:split], order[split:])
        ]
        back_N = torch.from_numpy(np.argsort(order)).to(hidden_NH.device)
        logprobs_N, entropy_N = (torch.cat(values)[back_N] for values in zip(*parts, strict=True))
        return logprobs_N, entropy_N

    def _score_alike(self, hidden_NH: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Targets of which either all have a support or none has, a chunk at a time."""
        head = self._model.get_output_embeddings()
        if is_plain(head) and head.weight.shape[0] == self._vocabulary:
            return score_with_head(hidden_NH, head, self._task(targets))
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(targets), self._chunk_tokens):
            piece = slice(start, start + self._chunk_tokens)
            inputs = (hidden_NH[piece], targets.targets_N[piece], targets.temperatures_N[piece], targets.blobs(piece))
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._score, *inputs, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._score(*inputs))
        if not parts:
            empty = hidden_NH.new_zeros(0, dtype=_at_least_float32(hidden_NH.dtype))
            return empty, empty
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _task(self, targets: Targets) -> HeadTask:
        device = targets.targets_N.device

        def allowed(piece: slice) -> Tensor | None:
            blobs = targets.blobs(piece)
            return self._allowed(blobs, device=device) if blobs else None

        return HeadTask(
            targets_N=targets.targets_N,
            temperatures_N=targets.temperatures_N,
            allowed=allowed,
            transform=self._transform,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=self._entropy_gradient,
        )

    def _hidden(self, input_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
        return self._decoder(
            input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.get_output_embeddings()(hidden)
        return self._transform(logits.to(_at_least_float32(logits.dtype)))

    def _score(
        self, hidden_CH: Tensor, targets_C: Tensor, temperatures_C: Tensor, blobs_C: list[bytes]
    ) -> tuple[Tensor, Tensor]:
        """One chunk: the only place where [chunk, V] logits exist."""
        logits_CV = self._fitted(self._logits(hidden_CH))
        scaled_CV = logits_CV / temperatures_C.to(logits_CV.dtype)[:, None]
        allowed_CV = self._allowed(blobs_C, device=scaled_CV.device) if blobs_C else None
        if allowed_CV is not None:
            scaled_CV = scaled_CV.masked_fill(~allowed_CV, -math.inf)
        normaliser_C = scaled_CV.logsumexp(-1)
        logprobs_C = scaled_CV.gather(1, targets_C[:, None])[:, 0] - normaliser_C
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._entropy_gradient):
            # Impossible tokens: 0 * -inf, in the gradient, too.
            finite_CV = scaled_CV if allowed_CV is None else scaled_CV.masked_fill(~allowed_CV, 0.0)
            entropy_C = normaliser_C - (torch.softmax(scaled_CV, -1) * finite_CV).sum(-1)
        return logprobs_C, entropy_C

    def _fitted(self, logits_CV: Tensor) -> Tensor:
        lacking = self._vocabulary - logits_CV.shape[-1]
        if lacking <= 0:
            return logits_CV[:, : self._vocabulary]
        return nn.functional.pad(logits_CV, (0, lacking), value=-math.inf)

    def _allowed(self, blobs_C: list[bytes], *, device: torch.device) -> Tensor:
        """[C, V] which tokens could have been drawn, put together on the device: the blobs are small, this is not."""
        allowed_CV = torch.zeros((len(blobs_C), self._vocabulary), dtype=torch.bool, device=device)

        def on_device(values: Sequence[int] | NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.asarray(values)).to(device)

        listed: dict[int, NDArray[np.int32]] = {}
        others: dict[bytes, list[int]] = {}
        for place, blob in enumerate(blobs_C):
            ids = listed_support(blob, vocabulary=self._vocabulary)
            if ids is None:
                others.setdefault(blob, []).append(place)
            else:
                listed[place] = ids
        if listed:
            places = np.repeat(list(listed), [len(ids) for ids in listed.values()])
            allowed_CV[on_device(places), on_device(np.concatenate(list(listed.values())).astype(np.int64))] = True
        if others:
            decoded = np.stack([decode_support(blob, vocabulary=self._vocabulary) for blob in others])
            which = np.repeat(np.arange(len(others)), [len(same) for same in others.values()])
            allowed_CV[on_device([place for same in others.values() for place in same])] = on_device(decoded)[
                on_device(which)
            ]
        return allowed_CV

    @torch.no_grad()
    def _probe_head(self) -> None:
        """Refuse a model whose logits are not the transformed output of its head."""
        ids = self._random_ids()
        mask = torch.ones_like(ids)
        wanted = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        wanted = wanted.to(_at_least_float32(wanted.dtype))
        got = self._logits(self._hidden(ids, mask))
        self._vocabulary = wanted.shape[-1]
        tolerance = self._tolerance(wanted)
        fits = got.shape == wanted.shape
        difference = (got - wanted).abs().max().item() if fits else math.inf
        if not difference <= tolerance:
            what = f"a difference of {difference:g}" if fits else f"shape {tuple(got.shape)}"
            raise SetupError(
                f"model {type(self._model).__name__} cannot be trained: its head on its hidden states must give its "
                f"own logits (shape {tuple(wanted.shape)}, within {tolerance:g}), got {what}; it transforms its logits "
                "in a way unknown to this release, or is not deterministic in evaluation mode; use another model: "
                + ", ".join(TRAINED)
            )

    @torch.no_grad()
    def _probe_padding(self) -> bool:
        """Whether the model needs a mask to ignore padding on the right.

        With causal attention it does not, and attention without a mask takes faster kernels (a third less
        time at 1024 tokens on a CPU).
        """
        ids = self._random_ids()
        alone = self._hidden(ids[:, : _PROBE_TOKENS // 2], None)
        padded = self._hidden(ids, None)[:, : _PROBE_TOKENS // 2]
        return not self.agree(padded, alone)

    def _random_ids(self) -> Tensor:
        embeddings = self._model.get_input_embeddings()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(embeddings.num_embeddings, (1, _PROBE_TOKENS), generator=generator)
        return ids.to(embeddings.weight.device)

    def agree(self, got: Tensor, wanted: Tensor) -> bool:
        """Whether hidden states [..., H] are equal but for the rounding of this model's dtype.

        Of each token by the norm: the largest of many differences would grow with their number, and with the layers.
        """
        distance, size = ((got - wanted).float().norm(dim=-1), wanted.float().norm(dim=-1))
        return bool((distance <= _PROBE_DISTANCE[self._dtype] * size).all())

    @property
    def _dtype(self) -> torch.dtype:
        return self._model.get_input_embeddings().weight.dtype

    def _tolerance(self, values: Tensor) -> float:
        """How far values may lie apart that are equal but for the rounding of this model's dtype."""
        return _PROBE_TOLERANCE[self._dtype] * max(1.0, values.abs().max().item())


def _decoder_of(model: Any) -> nn.Module:
    """The module whose last hidden states feed the output embeddings."""
    decoder = model.get_decoder()
    if decoder is model or model.get_output_embeddings() is None:
        raise SetupError(
            f"model {type(model).__name__} cannot be trained: expected a causal LM with a decoder and output "
            f"embeddings; use another model: {', '.join(TRAINED)}"
        )
    return decoder


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
