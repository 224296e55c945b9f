"""Walking a tree path by path gives the gradients of separate rows, whatever the pieces, the model and the loss."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from wingbeat.core.support import encode_support
from wingbeat.trainer.depth_first import DepthFirst, Piece, pieces
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.rows import Row
from wingbeat.trainer.token_batch import TokenBatch
from wingbeat.trainer.tree_plan import Ints, TreePlan

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

VOCAB = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
WINDOWED = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "num_hidden_layers": 3}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3 (tied head)": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "llama (own head)": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "gemma3 (windows)": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**(SIZES | WINDOWED | LAYERS))),
    "gemma2 (windows, soft caps)": lambda: Gemma2ForCausalLM(
        Gemma2Config(**(SIZES | WINDOWED | LAYERS), attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gpt-oss (windows, sinks)": lambda: GptOssForCausalLM(
        GptOssConfig(**(SIZES | WINDOWED | LAYERS), num_local_experts=4, num_experts_per_tok=2)
    ),
}
PPO = LossConfig("grpo", clip_low=0.2, clip_high=0.2, length_norm_tokens=32)


EXACT = ["qwen3 (tied head)", "llama (own head)", "gemma3 (windows)"]
"""Gemma 2's own attention, the reference for soft caps, has its softmax in float32 whatever the model's dtype."""


def build(name: str = "qwen3 (tied head)", *, dtype: torch.dtype = torch.float64) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = MODELS[name]().to(dtype).eval()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(normalise, module)
    return model


def normalise(module: Any, hidden: Tensor) -> Tensor:
    """What transformers computes in float32 even in a float64 model, where that noise would hide errors."""
    gemma = hasattr(module, "eps")
    scale = (hidden.square().mean(-1, keepdim=True) + (module.eps if gemma else module.variance_epsilon)).rsqrt()
    return hidden * scale * (1 + module.weight if gemma else module.weight)


@dataclass(frozen=True)
class Case:
    """Rows, and what their losses need: an advantage per row."""

    rows: list[Row]
    advantages_R: list[float]

    @property
    def trained_R(self) -> list[int]:
        return [row.num_trained for row in self.rows]

    def per_token(self, values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float64), self.trained_R))

    @property
    def sampling_N(self) -> Tensor:
        return torch.from_numpy(np.concatenate([row.sampling_logprobs_N for row in self.rows]).astype(np.float64))


def random_case(seed: int, *, rows: int = 8, longest: int = 12, supports: bool = False) -> Case:
    """Each row begins like an earlier one, cut anywhere: forks in turns, prefixes and duplicates among them."""
    rng = np.random.default_rng(seed)
    tokens: list[Any] = [rng.integers(0, VOCAB, longest)]
    for _ in range(rows - 1):
        old = tokens[rng.integers(len(tokens))]
        new = rng.integers(0, VOCAB, rng.integers(0, longest + 1))
        grown = np.concatenate([old[: rng.integers(len(old) + 1)], new])
        tokens.append(grown if len(grown) >= 2 else old)
    found: list[Row] = []
    for ids in tokens:
        trained = rng.random(len(ids)) < rng.choice([0.1, 0.6])
        trained[0] = False
        targets = np.flatnonzero(trained)
        blob = encode_support(np.isin(np.arange(VOCAB), [*ids[targets].tolist(), 3, 5, 7]))
        found.append(
            Row(
                episode=0,
                token_ids_T=ids.astype(np.int32),
                targets_N=targets,
                sampling_logprobs_N=rng.normal(-3.0, 0.5, len(targets)).astype(np.float32),
                versions_N=np.zeros(len(targets), np.int32),
                temperature=float(rng.choice([1.0, 0.75])),
                num_excluded=0,
                supports_N=np.full(len(targets), 0 if supports else -1, np.int32),
                support_table=(blob,),
            )
        )
    return Case(found, rng.normal(0, 1, rows).tolist())


TokensLoss = Callable[[Case, Ints, Tensor, Tensor], Tensor]


def token_loss(case: Case, places_N: Ints, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """PPO's clipped objective, a sum over tokens."""
    batch = TokenBatch(
        policy_logprobs_N=logprobs,
        sampling_logprobs_N=case.sampling_N[places_N].to(logprobs.dtype),
        entropy_N=entropy,
        advantages_N=case.per_token(case.advantages_R)[places_N].to(logprobs.dtype),
        weights_N=torch.full_like(logprobs, 0.1),
        sequences_N=torch.from_numpy(places_N),
        on_policy_N=torch.zeros_like(logprobs, dtype=torch.bool),
    )
    return policy_loss(batch, config=PPO)


def sequence_loss(case: Case, places_N: Ints, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """GSPO's objective (arXiv 2507.18071, eq. 5): one ratio per row, the geometric mean of its tokens'."""
    rows_N = torch.from_numpy(np.repeat(np.arange(len(case.rows)), case.trained_R))[places_N]
    log_ratio = logprobs - case.sampling_N[places_N].to(logprobs.dtype)
    total = logprobs.new_zeros(())
    for row in rows_N.unique():
        ratio = log_ratio[rows_N == row].mean().exp()
        advantage = case.advantages_R[int(row)]
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return total


def rows_gradient(model: Any, case: Case, loss: TokensLoss) -> tuple[dict[str, Tensor], float, Tensor]:
    """The reference: every row alone, through the model's own logits."""
    model.zero_grad()
    parts: list[Tensor] = []
    for row in case.rows:
        ids = torch.from_numpy(row.token_ids_T.astype(np.int64))
        scaled_TV = model(input_ids=ids[None]).logits[0] / row.temperature
        scaled_NV = scaled_TV[row.targets_N - 1]
        if (row.supports_N >= 0).any():
            allowed = np.isin(np.arange(VOCAB), [*row.token_ids_T[row.targets_N].tolist(), 3, 5, 7])
            scaled_NV = scaled_NV.masked_fill(~torch.from_numpy(allowed), -torch.inf)
        parts.append(scaled_NV.log_softmax(-1)[torch.arange(row.num_trained), ids[row.targets_N]])
    logprobs_N = torch.cat(parts)
    total = loss(case, np.arange(len(logprobs_N)), logprobs_N, torch.zeros_like(logprobs_N))
    total.backward()
    return gradient(model), float(total.detach()), logprobs_N.detach()


def gradient(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tree_gradient(
    model: Any, case: Case, loss: TokensLoss, *, max_tokens: int, base: Any = None
) -> tuple[dict[str, Tensor], float, Tensor]:
    model.zero_grad()
    walker = DepthFirst(LogprobModel(model if base is None else base, chunk_tokens=5), max_tokens=max_tokens)
    result = walker.run(
        TreePlan.of(case.rows),
        trained_R=case.trained_R,
        loss_of=lambda places, logprobs, entropy: loss(case, places, logprobs, entropy),
    )
    return gradient(model), float(result.loss), result.logprobs_N


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    size = sum(float(grad.square().sum()) for grad in one.values())
    return (difference / max(size, 1e-30)) ** 0.5


@pytest.mark.parametrize("loss", [token_loss, sequence_loss])
@pytest.mark.parametrize("max_tokens", [1, 14, 10_000])
@pytest.mark.parametrize("name", [EXACT[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXACT[1:])])
def test_gradients_equal_those_of_rows(name: str, max_tokens: int, loss: TokensLoss) -> None:
    model, case = build(name), random_case(1)
    expected, total, logprobs_N = rows_gradient(model, case, loss)
    got, tree_total, tree_logprobs_N = tree_gradient(model, case, loss, max_tokens=max_tokens)
    assert distance(expected, got) <= 1e-12
    assert tree_total == pytest.approx(total, rel=1e-12)
    assert torch.allclose(tree_logprobs_N, logprobs_N, rtol=0, atol=1e-12)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 12), longest=st.integers(2, 20), max_tokens=st.integers(1, 60))
def test_random_trees(seed: int, rows: int, longest: int, max_tokens: int) -> None:
    case = random_case(seed, rows=rows, longest=longest)
    if not any(case.trained_R):
        return
    model = build("gemma3 (windows)")
    expected, _, _ = rows_gradient(model, case, token_loss)
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=max_tokens)
    assert distance(expected, got) <= 1e-12


@pytest.mark.parametrize("max_tokens", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (500, 10_000))])
@pytest.mark.parametrize("name", [pytest.param("qwen3 (tied head)", marks=pytest.mark.slow), "gemma3 (windows)"])
def test_segments_many_windows_long(name: str, max_tokens: int) -> None:
    model, case = build(name), random_case(1, rows=4, longest=400)
    expected, _, _ = rows_gradient(model, case, token_loss)
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=max_tokens)
    assert distance(expected, got) <= 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_float32(name: str) -> None:
    model, case = build(name, dtype=torch.float32), random_case(2)
    expected, _, _ = rows_gradient(model, case, token_loss)
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=14)
    assert distance(expected, got) <= 1e-5


def test_bfloat16() -> None:
    """No worse than rows in bfloat16, both against float32."""
    case = random_case(2)
    exact, _, _ = rows_gradient(build(dtype=torch.float32), case, token_loss)
    model = build(dtype=torch.bfloat16)
    rows, _, _ = rows_gradient(model, case, token_loss)
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=14)
    assert distance(exact, got) <= 1.5 * distance(exact, rows)


def test_supports() -> None:
    model, case = build(), random_case(3, supports=True)
    expected, _, logprobs_N = rows_gradient(model, case, token_loss)
    got, _, tree_logprobs_N = tree_gradient(model, case, token_loss, max_tokens=14)
    assert distance(expected, got) <= 1e-12
    assert torch.allclose(tree_logprobs_N, logprobs_N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"], ["down_proj"]])
def test_adapters(targets: list[str]) -> None:
    """Wherever they sit, also where a layer's keys need no gradient at all."""
    base, case = build(), random_case(4)
    base.requires_grad_(False)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    expected, _, _ = rows_gradient(model, case, token_loss)
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=14, base=base)
    assert distance(expected, got) <= 1e-12


@pytest.mark.parametrize("name", ["qwen3 (tied head)", "gemma3 (windows)"])
def test_gradient_checkpointing(name: str) -> None:
    """Layers run again on the way up, when the path holds other pieces' keys behind their own."""
    model, case = build(name), random_case(5)
    expected, _, _ = rows_gradient(model, case, token_loss)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=14)
    assert distance(expected, got) <= 1e-12


def test_pieces_below_without_loss_of_their_own_and_a_loss_without_gradient() -> None:
    """A fork whose tokens train only at its leaves, one of which has advantage zero."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCAB, 9)
    rows = []
    for length in (3, 8, 5):
        ids = np.concatenate([trunk, rng.integers(0, VOCAB, length)]).astype(np.int32)
        row = random_case(0, rows=1, longest=len(ids)).rows[0]
        targets = np.array([len(ids) - 1])
        rows.append(Row(0, ids, targets, np.float32([-3.0]), row.versions_N[:1] * 0, 1.0, 0, np.int32([-1])))
    case, model = Case(rows, [1.0, 0.0, -0.5]), build()
    expected, _, _ = rows_gradient(model, case, token_loss)
    got, _, _ = tree_gradient(model, case, token_loss, max_tokens=1)
    assert distance(expected, got) <= 1e-12


def test_without_gradients_it_only_measures() -> None:
    model, case = build(), random_case(1)
    _, total, logprobs_N = rows_gradient(model, case, token_loss)
    model.zero_grad()
    with torch.no_grad():
        got, tree_total, tree_logprobs_N = tree_gradient(model, case, token_loss, max_tokens=14)
    assert got == {}
    assert tree_total == pytest.approx(total)
    assert torch.allclose(tree_logprobs_N, logprobs_N)


def test_pieces_of_the_worked_instance() -> None:
    """Rows ``1 2 3 4 9`` and ``1 2 5 9``: a trunk of two tokens with branches of two and one."""
    rows = [_row([1, 2, 3, 4, 9]), _row([1, 2, 5, 9])]
    plan = TreePlan.of(rows)
    assert pieces(plan, max_tokens=5) == [Piece(0, 5, 5, 0)]
    trunk = Piece(0, 2, 5, 0)
    assert pieces(plan, max_tokens=4) == [trunk, Piece(2, 4, 4, 2), Piece(4, 5, 5, 2)]
    assert pieces(plan, max_tokens=1) == [trunk, Piece(2, 4, 4, 2), Piece(4, 5, 5, 2)]


def _row(ids: list[int]) -> Row:
    targets = np.arange(2, len(ids))
    zeros = np.zeros(len(targets), np.int32)
    return Row(0, np.asarray(ids, np.int32), targets, zeros.astype(np.float32), zeros, 1.0, 0, zeros - 1)


@given(seed=st.integers(0, 10**6), max_tokens=st.integers(1, 80))
def test_pieces_cover_the_tree_within_the_budget(seed: int, max_tokens: int) -> None:
    case = random_case(seed)
    plan = TreePlan.of(case.rows)
    found = pieces(plan, max_tokens=max_tokens)
    assert [piece.start for piece in found] == [0, *(piece.stop for piece in found[:-1])][: len(found)]
    assert sum(piece.num_tokens for piece in found) == plan.num_tokens
    for piece in found:
        assert piece.end <= max(max_tokens, plan.longest_path)
        assert piece.depth == plan.positions_T[piece.start]


MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from transformers import Qwen3Config, Qwen3ForCausalLM
import tests_depth_first as t

config = dict(t.SIZES, vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=6)
model = Qwen3ForCausalLM(Qwen3Config(**config, head_dim=32, tie_word_embeddings=True)).eval()
case = t.branches(trunk=256, branch=512, count=8)
t.tree_gradient(model, t.branches(trunk=2, branch=2, count=2), t.token_loss, max_tokens=1)
def status_kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

Path("/proc/self/clear_refs").write_text("5")  # imports have peaks of their own
before = status_kib("VmRSS")
t.tree_gradient(model, case, t.token_loss, max_tokens=int(sys.argv[1]))
print(json.dumps(status_kib("VmHWM") - before))
"""


def branches(*, trunk: int, branch: int, count: int) -> Case:
    """Long replies to one prompt, of each of which the last token trains."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, trunk).tolist()
    rows = [_row([*prompt, *rng.integers(0, VOCAB, branch).tolist()]) for _ in range(count)]
    return Case(rows, [1.0] * count)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the resident set's peak from Linux")
def test_only_one_path_is_in_memory() -> None:
    """Eight branches, each twice as long as their prompt: one path is a sixth of the tree."""
    loader = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('tests_depth_first', sys.argv[2]);"
        "module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module;"
        "spec.loader.exec_module(module)\n"
    )

    def peak_kib(max_tokens: int) -> int:
        command = [sys.executable, "-c", loader + MEMORY_SCRIPT, str(max_tokens), __file__]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        return json.loads(done.stdout.splitlines()[-1])

    path, whole = peak_kib(1), peak_kib(1_000_000)
    assert path < 0.35 * whole
