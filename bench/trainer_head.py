"""The head alone, in a process of its own: ``python -m bench.trainer_head naive|ours [TOKENS VOCABULARY]``.

Logprobs and entropies of 4,096 tokens over 32,768 logits, forward and backward.  ``naive`` is how one writes it down:
logits, log-softmax, gather.  The last line of output is one JSON object: least CPU seconds, and what the process's
peak grew by.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor, nn

from bench.machine import status_kib
from wingbeat.core.config import TrainerConfig
from wingbeat.trainer.head import HeadTask, LogitTransform, score_with_head

HIDDEN, REPEATS = 256, 3


def naive(hidden_NH: Tensor, head: nn.Linear, targets_N: Tensor) -> Tensor:
    logprobs_NV = torch.log_softmax(head(hidden_NH), -1)
    with torch.no_grad():
        (logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0]


def ours(hidden_NH: Tensor, head: nn.Linear, targets_N: Tensor) -> Tensor:
    task = HeadTask(
        targets_N=targets_N,
        temperatures_N=torch.ones(len(targets_N)),
        allowed=lambda _piece: None,
        transform=LogitTransform(),
        chunk_tokens=TrainerConfig().logprob_chunk_tokens,
        entropy_gradient=False,
    )
    return score_with_head(hidden_NH, head, task)[0]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = {"naive": naive, "ours": ours}[sys.argv[1]]
    tokens, vocabulary = (int(size) for size in sys.argv[2:4]) if len(sys.argv) > 2 else (4096, 32768)
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    hidden_NH = torch.randn(tokens, HIDDEN).requires_grad_()
    targets_N, weights_N = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)
    for leaf in (head.weight, hidden_NH):
        leaf.grad = torch.zeros_like(leaf)
    head(hidden_NH[:8]).sum().backward()
    before = status_kib("VmHWM")
    least = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        (kind(hidden_NH, head, targets_N) * weights_N).sum().backward()
        least = min(least, time.process_time() - started)
    sys.stdout.write(json.dumps({"cpu_s": least, "peak_kib": status_kib("VmHWM") - before}) + "\n")


if __name__ == "__main__":
    main()
