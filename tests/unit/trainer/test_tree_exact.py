"""Gradients of trees equal those of unmerged rows: every algorithm, backend, partition and shape of tree.

The reference is the plainest thing there is: one row per turn (a run of sampled tokens with all that precedes
it), padded and forwarded without any tree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wingbeat.core.config.trainer import Algorithm, TrainerConfig
from wingbeat.trainer.batching import Credit, TokenFacts
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.losses import policy_loss
from wingbeat.trainer.rows import Row
from wingbeat.trainer.scores import Scores
from wingbeat.trainer.token_batch import TokenBatch
from wingbeat.trainer.tree_plan import TreePlan
from wingbeat.trainer.tree_scorer import TreeScorer
from wingbeat.trainer.update import GradientPass, PassResult
from wingbeat.trainer.updates import Totals, Update, token_weight

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"prefix_tree": "off", "sequence_packing": "on"},
    "trees and packs": {"prefix_tree": "auto", "prefix_tree_min_sharing": 1.3, "sequence_packing": "on"},
}
BACKENDS = ["mask", "nodes", "auto", "depth_first", *OTHER_LAYOUTS]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
CPU = torch.device("cpu")
Gradients = dict[str, Tensor]
MakeRows = Callable[[np.random.Generator], list[Row]]


@dataclass(frozen=True)
class Case:
    """Rows of several episodes, with what each episode earned."""

    rows: list[Row]
    credit: Credit
    config: TrainerConfig
    scores: Scores

    @property
    def loss_config(self) -> LossConfig:
        return LossConfig.resolve(self.config, context_tokens=32)

    def update(self, rows: Sequence[Row]) -> Update:
        return Update(list(rows), self.credit, on_policy_version=None, scores=self.scores)

    def by_turns(self) -> Update:
        """One row per run of trained tokens: what trains without any merging."""
        turns: list[Row] = []
        places: list[tuple[int, np.ndarray]] = []
        for row in self.rows:
            for turn, run in _turns(row) if row.num_trained else ():
                places.append((row.index, run))
                turns.append(replace(turn, index=len(turns)))

        def split(values_N: Any) -> Any:
            return None if values_N is None else [values_N[index][run] for index, run in places]

        scores = Scores(**{item.name: split(getattr(self.scores, item.name)) for item in fields(Scores)})
        credit = replace(self.credit, advantages_N=split(self.credit.advantages_N))
        return Update(turns, credit, on_policy_version=None, scores=scores)


def _turns(row: Row) -> list[tuple[Row, np.ndarray]]:
    """Each run of trained tokens as a row, and its places among the row's."""
    runs = np.split(np.arange(row.num_trained), np.flatnonzero(np.diff(row.targets_N) > 1) + 1)
    turns = [
        replace(
            row,
            token_ids_T=row.token_ids_T[: row.targets_N[run[-1]] + 1],
            targets_N=row.targets_N[run],
            sampling_logprobs_N=row.sampling_logprobs_N[run],
            versions_N=row.versions_N[run],
            supports_N=row.supports_N[run],
        )
        for run in runs
    ]
    return list(zip(turns, runs, strict=True))


def _case(
    model: Any,
    rows: list[Row],
    *,
    noise: int = 0,
    algorithm: Algorithm = "grpo",
    budget: int = 10_000,
    rules: Mapping[str, Any] | None = None,
) -> Case:
    """Rows whose sampling logprobs lie so close to the policy's that some are clipped and most are not.

    Each token has an advantage of its own.  ``noise`` is a seed.
    """
    rng = np.random.default_rng(noise)
    with torch.no_grad(), _trees(model).scored(TreePlan.of(rows)) as (logprobs_N, _):
        noisy = np.split(logprobs_N.double().numpy() + rng.normal(0, 0.2, len(logprobs_N)), np.cumsum(_counts(rows)))
    rows = [
        replace(row, sampling_logprobs_N=found.astype(np.float32)) for row, found in zip(rows, noisy[:-1], strict=True)
    ]
    wide: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.1} if algorithm == "gspo" else {}
    wide |= {"teacher": "x"} if algorithm == "distill" else {}
    settings: dict[str, Any] = {"micro_batch_tokens": budget, "logprob_chunk_tokens": 5} | wide | dict(rules or {})
    config = TrainerConfig(algorithm=algorithm, **settings)
    loss_config = LossConfig.resolve(config, context_tokens=32)
    tokens = [sum(row.num_trained for row in rows if row.episode == episode) for episode in range(4)]
    totals = Totals(num_episodes=4, num_tokens=max(1, sum(tokens)), num_groups=2)
    pairs = [max(1, tokens[0] + tokens[1]), max(1, tokens[2] + tokens[3])]
    weights = [
        token_weight(loss_config, episode_tokens=max(1, count), totals=totals, group_tokens=pairs[episode // 2])
        for episode, count in enumerate(tokens)
    ]
    sft = [1 / totals.num_tokens, 0.0, 1 / totals.num_tokens, 0.0] if loss_config.sft_coef else []
    credit = Credit([rng.normal(0, 1, row.num_trained) for row in rows], weights, sft)
    return Case(rows, credit, config, _scores(rows, loss_config, rng))


def _scores(rows: Sequence[Row], config: LossConfig, rng: np.random.Generator) -> Scores:
    """Other models that think much like the sampler; equal tokens of one place may be scored differently, as no two
    rows of it were sampled alike."""

    def near(wanted: bool) -> list[np.ndarray] | None:
        return [row.sampling_logprobs_N + rng.normal(0, 0.2, row.num_trained) for row in rows] if wanted else None

    return Scores(
        proximal_N=near(config.algorithm == "decoupled_ppo"),
        reference_N=near(config.needs_reference),
        teacher_N=near(config.needs_teacher),
    )


def _counts(rows: Sequence[Row]) -> list[int]:
    return [row.num_trained for row in rows]


@functools.cache
def _scorer(model: Any, *, chunk_tokens: int, entropy_gradient: bool = False) -> LogprobModel:
    """A model is probed once: that takes as long as a gradient."""
    return LogprobModel(model, chunk_tokens=chunk_tokens, entropy_gradient=entropy_gradient)


@functools.cache
def _trees(model: Any) -> TreeScorer:
    return TreeScorer(_scorer(model, chunk_tokens=64), backend="mask", device=CPU)


def _gradients(
    model: Any, run: Callable[[LogprobModel], PassResult], *, entropy_gradient: bool = False
) -> tuple[Gradients, PassResult]:
    model.zero_grad(set_to_none=True)
    result = run(_scorer(model, chunk_tokens=5, entropy_gradient=entropy_gradient))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, result


def _by_turns(model: Any, case: Case) -> tuple[Gradients, PassResult]:
    """The reference."""
    config = case.config.model_copy(
        update={"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 10_000}
    )
    run = lambda scorer: _pass(scorer, case, config).run(case.by_turns())  # noqa: E731
    return _gradients(model, run, entropy_gradient=config.entropy_coef > 0)


def _by_tree(model: Any, case: Case, *, backend: str) -> tuple[Gradients, PassResult]:
    layout = OTHER_LAYOUTS.get(backend, {"prefix_tree": "on", "prefix_tree_backend": backend})
    config = case.config.model_copy(update=layout)
    rows = [row for row in case.rows if row.num_trained]
    run = lambda scorer: _pass(scorer, case, config).run(case.update(rows))  # noqa: E731
    return _gradients(model, run, entropy_gradient=config.entropy_coef > 0)


def _pass(scorer: LogprobModel, case: Case, config: TrainerConfig) -> GradientPass:
    return GradientPass(scorer, config=config, loss_config=case.loss_config, device=CPU)


def _distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Relative L2 over all parameters; one that got no gradient on a side counts as zero there."""
    names = left.keys() | right.keys()
    zero = torch.zeros(())
    difference = sum(float((left.get(n, zero) - right.get(n, zero)).double().square().sum()) for n in names)
    size = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def _assert_equal(got: tuple[Gradients, PassResult], wanted: tuple[Gradients, PassResult], tolerance: float) -> None:
    assert _distance(got[0], wanted[0]) <= tolerance
    assert got[1].loss == pytest.approx(wanted[1].loss, abs=10 * tolerance)
    assert got[1].stats.tokens == wanted[1].stats.tokens, "each trained token exactly once"


@pytest.fixture(scope="module")
def exact_model(build_model: Callable[..., Any]) -> Callable[[str, torch.dtype], Any]:
    """Models that compute in their dtype throughout: transformers' norms take a detour through float32."""
    made: dict[tuple[str, torch.dtype], Any] = {}

    def model(kind: str, dtype: torch.dtype) -> Any:
        if (kind, dtype) not in made:
            found = build_model(kind).to(dtype)
            for module in found.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = _norm(module)
            made[kind, dtype] = found
        return made[kind, dtype]

    return model


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
    return lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + module.weight)


@dataclass(frozen=True)
class Known:
    """A case with what its turns give, which every backend is to give."""

    model: Any
    case: Case
    wanted: tuple[Gradients, PassResult]


@pytest.fixture(scope="module")
def known(exact_model: Callable[..., Any], make_rows: MakeRows) -> Callable[..., Known]:
    """Made once for all backends; ``seed`` is that of the rows, the rest as :func:`_case` takes it."""
    made: dict[str, Known] = {}

    def find(kind: str, dtype: torch.dtype, *, seed: int, **how: Any) -> Known:
        key = repr((kind, dtype, seed, how))
        if key not in made:
            model = exact_model(kind, dtype)
            case = _case(model, make_rows(np.random.default_rng(seed)), **how)
            made[key] = Known(model, case, _by_turns(model, case))
        return made[key]

    return find


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "packed"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    algorithm=st.sampled_from(ALGORITHMS),
    kind=st.sampled_from(["qwen3", "llama", "gemma3"]),
    budget=st.sampled_from([1, 6, 15, 30, 10_000]),
)
def test_random_trees(
    backend: str,
    dtype: torch.dtype,
    known: Callable[..., Known],
    seed: int,
    algorithm: Algorithm,
    kind: str,
    budget: int,
) -> None:
    found = known(kind, dtype, seed=seed, noise=seed, algorithm=algorithm, budget=budget)
    _assert_equal(_by_tree(found.model, found.case, backend=backend), found.wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_on_every_backend(
    algorithm: Algorithm, backend: str, dtype: torch.dtype, known: Callable[..., Known]
) -> None:
    found = known("qwen3", dtype, seed=5, algorithm=algorithm, budget=8)
    _assert_equal(_by_tree(found.model, found.case, backend=backend), found.wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["auto", "mask", "nodes", "depth_first"])
@pytest.mark.parametrize(
    ("algorithm", "rules"),
    [
        ("gspo", {"sequence_ratio": "product"}),
        ("grpo", {"tis_cap": 1.05, "clip_high": 0.4}),
        ("grpo", {"sequence_mask_low": 0.9, "sequence_mask_high": 1.1}),
        ("gspo", {"sequence_mask_low": 0.9, "sequence_mask_high": 1.1}),
        ("grpo", {"mis_low": 0.8, "mis_high": 1.2}),
        ("dapo", {"sequence_mis_low": 0.7, "sequence_mis_high": 1.4, "sequence_tis_cap": 1.1}),
        ("rloo", {"sequence_tis_cap": 1.2}),
        ("decoupled_ppo", {"tis_cap": 1.1, "token_mean": "prompt"}),
        ("decoupled_ppo", {"sequence_tis_cap": 1.1, "mis_high": 1.3}),
        ("m2po", {"m2_threshold": 0.01}),
        ("distill", {"tis_cap": 1.1, "mis_low": 0.8}),
    ],
)
def test_sequence_ratios_and_corrections_on_every_backend(
    algorithm: Algorithm, rules: dict[str, Any], backend: str, known: Callable[..., Known]
) -> None:
    """A row's turns are those of rows that hold one turn each; some are masked or capped, not all."""
    affected = tokens = 0.0
    for seed in (5, 6, 7):
        found = known("qwen3", torch.float64, seed=seed, algorithm=algorithm, budget=8, rules=rules)
        got, wanted = _by_tree(found.model, found.case, backend=backend), found.wanted
        _assert_equal(got, wanted, TOLERANCE[torch.float64])
        stats = got[1].stats
        assert (stats.capped, stats.masked) == (wanted[1].stats.capped, wanted[1].stats.masked)
        affected += max(stats.capped, stats.masked, stats.clipped_low + stats.clipped_high)
        tokens += stats.tokens
    assert 0.05 < affected / tokens < 0.95


@pytest.mark.parametrize("backend", ["depth_first", "mask", "nodes", "auto", "trees and packs"])
@pytest.mark.parametrize(
    ("algorithm", "rules"),
    [
        ("grpo", {"kl_coef": 0.3, "kl_estimator": "k1", "tis_cap": 1.1}),
        ("dapo", {"kl_coef": 0.3, "kl_estimator": "k2", "token_mean": "prompt"}),
        ("rloo", {"kl_coef": 0.3, "sft_coef": 0.5}),
        ("grpo", {"entropy_coef": 0.1}),
        ("decoupled_ppo", {"entropy_coef": 0.1, "kl_coef": 0.3, "sft_coef": 0.5}),
        ("sft", {"entropy_coef": 0.1, "kl_coef": 0.3}),
        ("distill", {"kl_coef": 0.3, "entropy_coef": 0.1}),
    ],
)
def test_terms_beside_the_algorithm_on_every_backend(
    algorithm: Algorithm, rules: dict[str, Any], backend: str, known: Callable[..., Known]
) -> None:
    """KL penalties, the entropy's own gradient, cross-entropy of some episodes."""
    for seed in (5, 6):
        found = known("qwen3", torch.float64, seed=seed, algorithm=algorithm, budget=8, rules=rules)
        got, wanted = _by_tree(found.model, found.case, backend=backend), found.wanted
        _assert_equal(got, wanted, TOLERANCE[torch.float64])
        assert got[1].stats.metrics() == pytest.approx(wanted[1].stats.metrics())


@pytest.mark.parametrize("backend", ["auto", "mask", "nodes", "depth_first", "packed"])
@pytest.mark.parametrize("kind", ["gemma2", "softcap", "gptoss", "cohere", "granite"])
def test_other_architectures(kind: str, backend: str, known: Callable[..., Known]) -> None:
    """Soft-capped scores, attention sinks, experts, scaled logits."""
    for seed in (1, 2):
        found = known(kind, torch.float32, seed=seed, budget=30)
        _assert_equal(_by_tree(found.model, found.case, backend=backend), found.wanted, 1e-5)


def test_the_cases_hold_what_they_claim(exact_model: Callable[..., Any], make_rows: MakeRows) -> None:
    """Over the seeds used here: shared trained tokens, duplicates, forks inside of turns, rows inside of others."""
    found = dict.fromkeys(("shared", "duplicate", "fork in turn", "inside", "without loss", "clipped"), 0)
    model = exact_model("qwen3", torch.float64)
    for seed in range(12):
        case = _case(model, make_rows(np.random.default_rng(seed)))
        plan = TreePlan.of(case.rows)
        paths = [tuple(row.token_ids_T) for row in case.rows]
        found["shared"] += len(plan.edges) < len(plan.edge_N)
        found["duplicate"] += len(set(paths)) < len(paths)
        found["fork in turn"] += len(set(plan.edges.sources_E.tolist())) < len(plan.edges)
        found["inside"] += any(a != b and b[: len(a)] == a for a in paths for b in paths)
        found["without loss"] += any(not row.num_trained for row in case.rows)
        stats = _by_tree(model, case, backend="auto")[1].stats
        found["clipped"] += 0 < stats.clipped_low + stats.clipped_high < stats.tokens
    assert min(found.values()) >= 3, found


# --- mutants: the check above must see them -----------------------------------------------------


def _of_plan(model: Any, case: Case, plan: TreePlan, *, backend: Any = "mask", loss: Any = None) -> Gradients:
    """The gradient that a plan gives, right or wrong."""

    def run(scorer: LogprobModel) -> PassResult:
        facts = TokenFacts.of(case.rows, credit=case.credit, device=CPU)
        with TreeScorer(scorer, backend=backend, device=CPU).scored(plan) as scored:
            tokens = facts.scored(*scored, on_policy_version=None)
            (loss or policy_loss)(tokens, config=case.loss_config).backward()
        return PassResult()

    return _gradients(model, run)[0]


def _forked_paths() -> list[np.ndarray]:
    """Four branches behind one prompt, two and two forking within a turn; the first one twice."""
    rng = np.random.default_rng(0)
    prompt, left, right, *ends = (rng.integers(0, 48, size) for size in (6, 3, 4, 5, 4, 3, 6))
    paths = [(prompt, left, end) for end in ends[:2]] + [(prompt, right, end) for end in ends[2:]]
    return [np.concatenate(path) for path in [*paths, paths[0]]]


@pytest.fixture
def forked(exact_model: Callable[..., Any], make_row: Callable[..., Row]) -> tuple[Any, Case, TreePlan, Gradients]:
    """A tree with forks, and its rows' gradient."""
    model = exact_model("qwen3", torch.float32)
    rng = np.random.default_rng(1)
    rows = [make_row(rng, path, episode=index % 4, start=6, index=index) for index, path in enumerate(_forked_paths())]
    case = _case(model, [replace(row, temperature=1.0) for row in rows], noise=3)
    plan = TreePlan.of(case.rows)
    assert plan.num_segments == 7
    wanted, _ = _by_turns(model, case)
    assert _distance(_of_plan(model, case, plan), wanted) <= 1e-5
    return model, case, plan, wanted


@pytest.mark.parametrize("branch", range(1, 7))
def test_positions_shifted_by_one_behind_a_fork_are_seen(
    branch: int, forked: tuple[Any, Case, TreePlan, Gradients]
) -> None:
    model, case, plan, wanted = forked
    positions_T = plan.positions_T.copy()
    positions_T[plan.starts_S[branch] : plan.touts_S[branch]] += 1
    assert _distance(_of_plan(model, case, replace(plan, positions_T=positions_T)), wanted) > 1e-5


@pytest.mark.parametrize("backend", ["mask", "nodes"])
@pytest.mark.parametrize("branch", [1, 2, 3, 5])
def test_a_token_that_leaks_into_the_next_branch_is_seen(
    branch: int, backend: Any, forked: tuple[Any, Case, TreePlan, Gradients]
) -> None:
    """Seen by one token too many: one key for the mask; for blocks a segment's, because that is their unit."""
    model, case, plan, wanted = forked
    assert plan.touts_S[branch] < plan.num_tokens
    tout_T, touts_S = plan.tout_T.copy(), plan.touts_S.copy()
    tout_T[plan.stops_S[branch] - 1] += 1
    touts_S[branch] += 1
    leaking = replace(plan, tout_T=tout_T, touts_S=touts_S)
    assert _distance(_of_plan(model, case, leaking, backend=backend), wanted) > 1e-5


def test_multiplicity_weights_with_averaged_advantages_are_seen(
    forked: tuple[Any, Case, TreePlan, Gradients],
) -> None:
    """What is exact only for losses linear in the logprob: one term per edge, weighted by how many rows share it."""
    model, case, plan, wanted = forked
    assert len(plan.edges) < len(plan.edge_N)
    edge_N = torch.from_numpy(plan.edge_N)
    count_E = torch.bincount(edge_N).double()
    first_E = torch.from_numpy(np.unique(plan.edge_N, return_index=True)[1])

    def mean(values_N: Tensor) -> Tensor:
        total_E = torch.zeros(len(count_E), dtype=torch.float64).index_add(0, edge_N, values_N.double())
        return (total_E / count_E).float()

    def averaged(tokens: TokenBatch, *, config: LossConfig) -> Tensor:
        merged = TokenBatch(
            policy_logprobs_N=tokens.policy_logprobs_N[first_E],
            sampling_logprobs_N=mean(tokens.sampling_logprobs_N),
            entropy_N=tokens.entropy_N[first_E],
            advantages_N=mean(tokens.advantages_N),
            weights_N=mean(tokens.weights_N) * count_E.float(),
            sequences_N=tokens.sequences_N[first_E],
            on_policy_N=tokens.on_policy_N[first_E],
        )
        return policy_loss(merged, config=config)

    assert _distance(_of_plan(model, case, plan, loss=averaged), wanted) > 1e-5
