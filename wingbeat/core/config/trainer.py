"""Configuration of training: algorithms, losses, optimiser."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from wingbeat.core.config.processes import check_processes
from wingbeat.core.config.section import Section

Algorithm = Literal[
    "reinforce",
    "reinforce_plus_plus",
    "rloo",
    "grpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "gspo",
    "sapo",
    "ppo",
    "decoupled_ppo",
    "m2po",
    "maxrl",
    "sft",
    "distill",
]
TOKEN_MEAN: tuple[Algorithm, ...] = ("dapo", "cispo", "ppo", "decoupled_ppo", "m2po", "distill")
"""Those that average over the tokens of a batch."""
WITHOUT_REWARD: tuple[Algorithm, ...] = ("sft", "distill")
"""Their gradient holds no advantage of an episode."""
OWN_RATIO_BOUND: tuple[Algorithm, ...] = ("cispo", "gspo", "sapo")
"""Those that bound what a ratio weighs by themselves."""
WITHOUT_CLIP: dict[str, str] = {
    "sapo": "a soft gate",
    "m2po": "a mask over the whole update (m2_threshold)",
    "sft": "no ratio",
}
WITHOUT_DEVIATION: tuple[Algorithm, ...] = ("reinforce", "rloo", "dr_grpo", "maxrl", *WITHOUT_REWARD)
"""Their advantages are not divided by a standard deviation."""
WITHOUT_GROUP_BASELINE: frozenset[Algorithm] = frozenset({"reinforce", "reinforce_plus_plus", "ppo", "sft", "distill"})
"""These learn also from a group whose rewards are all equal."""


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning (PEFT)."""

    rank: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="Scale: updates are multiplied by alpha / rank.")
    dropout: float = Field(
        default=0.0, ge=0, le=0, description="Must be 0: dropout would make trained and sampled logprobs differ."
    )
    targets: list[str] | Literal["all-linear"] = Field(
        default="all-linear", description="Module names to adapt, as PEFT takes them."
    )
    group: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Policies of the same group share one base model: one trainer process, which they use by turns, and"
        " one engine batch; unset: a copy of the base model, and a trainer, of its own.",
    )


class CriticConfig(Section):
    """The value model of `ppo`: the policy's architecture with a scalar head, trained beside it."""

    learning_rate: float = Field(default=1e-5, ge=0, description="Of the value model.")
    warmup_steps: int = Field(
        default=0, ge=0, description="First steps, in which only the value model is trained and the policy stays."
    )
    value_clip: PositiveFloat | Literal["unlimited"] = Field(
        default=0.2,
        description="Values gain nothing by moving further than this from the step's start, in several updates.",
    )
    updates_per_batch: int = Field(
        default=1, ge=1, description="Updates of the value model per step, each over the whole batch."
    )


class TrainerConfig(Section):
    """Optimisation of one policy."""

    algorithm: Algorithm = Field(default="grpo", description="Advantage estimator and loss, see docs/algorithms.md.")
    learning_rate: float = Field(default=1e-6, ge=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after warm-up, down to `min_lr_ratio` at `run.steps`."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW betas.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global norm.")
    clip_low: float | None = Field(
        default=None,
        ge=0,
        description="Ratios are clipped at 1 - clip_low; unset: 0.2, 1 for cispo (no lower bound), 3e-4 for gspo."
        " decoupled_ppo: with several updates per batch only.",
    )
    clip_high: float | None = Field(
        default=None,
        ge=0,
        description="... and at 1 + clip_high; unset: 0.2, 0.28 for dapo, 4 for cispo, 4e-4 for gspo.",
    )
    sequence_ratio: Literal["geometric_mean", "product"] = Field(
        default="geometric_mean",
        description="gspo's ratio of a turn, from those of its tokens; `product` is clipped at 0.2 unless set.",
    )
    sapo_tau_positive: float = Field(
        default=1.0, gt=0, description="Temperature of sapo's gate for positive advantages; higher closes sooner."
    )
    sapo_tau_negative: float = Field(default=1.05, gt=0, description="... and for negative ones.")
    tis_cap: float | None = Field(
        default=None,
        ge=1,
        description="Rollout correction: a token's ratio weighs its gradient by at most this; unset: no cap. Not with"
        " cispo, gspo, sapo, which bound it themselves. decoupled_ppo: the ratio of proximal to sampling probability.",
    )
    sequence_tis_cap: float | None = Field(
        default=None,
        ge=1,
        description="Rollout correction: every token's gradient is weighted by its turn's ratio (product over tokens),"
        " at most by this, in place of its own; not together with tis_cap.",
    )
    mis_low: float | None = Field(
        default=None, gt=0, le=1, description="Rollout correction: tokens whose ratio is lower are not trained."
    )
    mis_high: float | None = Field(default=None, ge=1, description="... and tokens whose ratio is higher.")
    sequence_mis_low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Rollout correction: turns whose ratio (product over tokens) is lower are not trained.",
    )
    sequence_mis_high: float | None = Field(default=None, ge=1, description="... and turns whose ratio is higher.")
    sequence_mask_low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Rollout correction: turns whose ratio (geometric mean over tokens) is lower are not trained;"
        " unset: none.",
    )
    sequence_mask_high: float | None = Field(
        default=None, ge=1, description="... and turns whose ratio is higher; unset: none."
    )
    m2_threshold: float = Field(
        default=0.04,
        gt=0,
        description="m2po: tokens are masked until the mean squared log-ratio of those that could be clipped is below.",
    )
    token_mean: Literal["batch", "prompt"] = Field(
        default="batch",
        description="dapo, cispo, decoupled_ppo, distill, m2po, ppo: the mean over tokens is of the whole update, or of"
        " each group and then over groups.",
    )
    credit: Literal["episode", "turn", "step_groups"] = Field(
        default="episode",
        description="What an advantage belongs to: the episode; each turn, by its discounted return; or both, where"
        " turns of one group that saw the same are compared (GiGPO).",
    )
    step_weight: float = Field(default=1.0, ge=0, description="Weight of the turns' advantages in `step_groups`.")
    gamma: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Discount: per turn along the tree's edges for `turn` and `step_groups`, per token for ppo.",
    )
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="ppo: lambda of the advantage estimate.")
    critic: CriticConfig | None = Field(default=None, description="Set by default for ppo; of ppo only.")
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL penalty towards `reference`.")
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="How the KL of a token is estimated; unset: k3 in the loss, k1 in the reward."
    )
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="Where the KL penalty is applied.")
    reference: str | None = Field(
        default=None,
        description="The model of `kl_coef`, as `model` names one, with the policy's tokenizer; unset: the policy as it"
        " was at step 0 (for LoRA its base model, which takes no memory).",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    sft_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the cross-entropy of episodes with at least `sft_min_reward`, beside the algorithm's"
        " loss; sft is nothing else.",
    )
    sft_min_reward: float = Field(default=1.0, description="Of `sft_coef`, and of sft itself; shaping included.")
    teacher: str | None = Field(
        default=None, description="distill: the model whose distribution is learnt; same tokenizer as the policy."
    )
    advantage_eps: float = Field(
        default=1e-4, gt=0, description="Added to the standard deviation, where the algorithm divides by one."
    )
    length_norm_tokens: int | None = Field(
        default=None, ge=1, description="dr_grpo's constant divisor per episode; unset: the policy's context."
    )
    updates_per_batch: int = Field(
        default=1, ge=1, description="Optimiser updates per step: the batch is split into so many by group."
    )
    max_skipped_steps: int = Field(
        default=3,
        ge=0,
        description="A step whose gradient is not finite moves no weight and is skipped; so many in a row, and the next"
        " ends training.",
    )
    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        description="Tokens per forward, padding included; changes memory and speed, never gradients. A forward that"
        " runs out of memory halves it, until it is set to another value.",
    )
    logprob_chunk_tokens: int = Field(default=512, ge=1, description="Positions whose logits exist at once.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    prefix_tree: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Samples that begin alike share one forward over what they share; changes speed, never gradients."
        " `auto` does so where a micro-batch saves at least `prefix_tree_min_sharing`.",
    )
    prefix_tree_min_sharing: float = Field(
        default=1.2, ge=1, description="Tokens of the rows / tokens of their tree from which `auto` uses the tree."
    )
    prefix_tree_backend: Literal["auto", "mask", "nodes", "flex", "depth_first"] = Field(
        default="auto",
        description="How a tree attends: one masked call, one call per branch, FlexAttention (CUDA), or one path at a"
        " time for trees larger than memory.",
    )
    sequence_packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Samples that share too little for a tree lie one behind another in one forward, without padding;"
        " changes speed, never gradients. `auto` does so where more than 3% would be padding, on a CPU or with"
        " FlexAttention.",
    )
    checkpoint_every: int = Field(default=50, ge=1, description="Steps between exact-resume checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Older checkpoints are deleted.")
    replay: bool = Field(
        default=True,
        description="A trainer that returns from a checkpoint repeats the steps since; false: it gives them up, and"
        " their episodes train again in a new lineage.",
    )
    threads: int | None = Field(default=None, ge=1, description="Torch threads; unset: cores / workers.")
    device: str = Field(
        default="auto",
        description="`auto` (torch.accelerator, else cpu) or a torch device; with `processes`, a kind of device, of"
        " which each takes its own.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        description="Processes that train the policy together, a device each: samples are dealt among them, weights and"
        " optimiser state sharded. Changes speed and memory, never gradients.",
    )
    reshard: Literal["step", "layer"] = Field(
        default="step",
        description="With `processes`, whole weights are gathered once per update (fastest), or around each layer"
        " (least memory).",
    )
    control: Literal["none", "shuffled_advantages"] = Field(
        default="none", description="Negative control: shuffle advantages over the batch, so that nothing is learnt."
    )

    @model_validator(mode="after")
    def _keys_fit_the_algorithm(self) -> TrainerConfig:
        """A key that would change nothing is a misunderstanding: refuse it."""
        algorithm = self.algorithm
        _check_only_of("teacher", self.teacher is not None, algorithm, ("distill",))
        _check_only_of("critic", self.critic is not None, algorithm, ("ppo",))
        _check_only_of("gae_lambda", self.gae_lambda != 0.95, algorithm, ("ppo",))
        _check_only_of("m2_threshold", self.m2_threshold != 0.04, algorithm, ("m2po",))
        _check_only_of("token_mean", self.token_mean != "batch", algorithm, TOKEN_MEAN)
        _check_only_of("length_norm_tokens", self.length_norm_tokens is not None, algorithm, ("dr_grpo",))
        if self.advantage_eps != 1e-4 and algorithm in WITHOUT_DEVIATION:
            raise ValueError(
                f"advantage_eps is added to a standard deviation, and {algorithm} divides by none; leave it"
            )
        if algorithm == "distill" and self.teacher is None:
            raise ValueError("distill needs a `teacher`: the model to learn from, with the policy's tokenizer")
        if self.gamma != 1.0 and algorithm != "ppo" and self.credit == "episode":
            raise ValueError("gamma discounts turns (credit = 'turn' or 'step_groups') or ppo's tokens; leave it at 1")
        if algorithm in WITHOUT_CLIP and (self.clip_low is not None or self.clip_high is not None):
            raise ValueError(
                f"{algorithm} has {WITHOUT_CLIP[algorithm]} and no clip; leave clip_low and clip_high unset"
            )
        if (
            algorithm == "decoupled_ppo"
            and self.updates_per_batch == 1
            and (self.clip_low is not None or self.clip_high is not None)
        ):
            raise ValueError(
                "decoupled_ppo clips what the updates of one batch move, and with updates_per_batch = 1 there is"
                " nothing to clip: leave clip_low and clip_high unset, or set updates_per_batch above 1"
            )
        if algorithm != "sapo" and (self.sapo_tau_positive, self.sapo_tau_negative) != (1.0, 1.05):
            raise ValueError(
                f"sapo_tau_positive and sapo_tau_negative are of sapo, not of {algorithm}; leave them unset"
            )
        if algorithm != "gspo" and self.sequence_ratio != "geometric_mean":
            raise ValueError(f"sequence_ratio is of gspo, {algorithm} has a ratio per token; leave it unset")
        return self

    @model_validator(mode="after")
    def _processes_fit(self) -> TrainerConfig:
        check_processes(self)
        return self

    @model_validator(mode="after")
    def _corrections_fit(self) -> TrainerConfig:
        """Rollout corrections that would change nothing, or say two things at once."""
        for key in ("tis_cap", "sequence_tis_cap"):
            if getattr(self, key) is not None and self.algorithm in OWN_RATIO_BOUND:
                raise ValueError(
                    f"{key} does not go with {self.algorithm}: cispo caps the ratio by clip_high, sapo by its gate,"
                    " gspo has one ratio per turn; leave it unset, or use sequence_mask_low and sequence_mask_high"
                )
        if self.tis_cap is not None and self.sequence_tis_cap is not None:
            raise ValueError(
                "tis_cap and sequence_tis_cap both say what a token's gradient weighs: by its own ratio, or by its"
                " turn's; set one of them"
            )
        masks = ("mis", "sequence_mis", "sequence_mask")
        keys = ("tis_cap", "sequence_tis_cap", *(f"{name}_{side}" for name in masks for side in ("low", "high")))
        found = [key for key in keys if getattr(self, key) is not None]
        if self.algorithm == "sft" and found:
            raise ValueError(f"{found[0]} corrects a ratio, and sft has none; leave it unset")
        return self

    @model_validator(mode="after")
    def _penalties_fit(self) -> TrainerConfig:
        """Terms beside the algorithm's own."""
        algorithm = self.algorithm
        if not self.kl_coef:
            for key, default in (("reference", None), ("kl_estimator", None), ("kl_in", "loss")):
                if getattr(self, key) != default:
                    raise ValueError(f"{key} is of the KL penalty; set kl_coef above 0, or leave it unset")
        if algorithm in WITHOUT_REWARD:
            if self.kl_coef and self.kl_in == "reward":
                raise ValueError(
                    f"kl_in = 'reward' changes nothing where {algorithm} trains without rewards; use 'loss'"
                )
            if self.credit != "episode":
                raise ValueError(f"credit is of rewards, and {algorithm} trains without; leave it unset")
            if self.control != "none":
                raise ValueError(f"control shuffles advantages, and {algorithm} has none; leave it unset")
        if algorithm == "maxrl" and self.kl_coef and self.kl_in == "reward":
            raise ValueError(
                "maxrl divides by the mean reward, which a penalty in the reward may turn negative; use kl_in = 'loss'"
            )
        if algorithm == "sft" and self.sft_coef:
            raise ValueError("sft is the cross-entropy itself; sft_coef adds one to another algorithm, leave it unset")
        if self.control != "none" and self.sft_coef:
            raise ValueError(
                "control = 'shuffled_advantages' lets nothing be learnt, and sft_coef learns from rewards all the same;"
                " leave one of them out"
            )
        if algorithm != "sft" and not self.sft_coef and self.sft_min_reward != 1.0:
            raise ValueError("sft_min_reward is of sft and of sft_coef; set sft_coef above 0, or leave it unset")
        if algorithm == "ppo" and self.credit != "episode":
            raise ValueError(
                "ppo gives every token its own credit, by the critic and the turns' rewards; leave credit unset"
            )
        if self.credit != "step_groups" and self.step_weight != 1.0:
            raise ValueError("step_weight is of credit = 'step_groups'; leave it unset")
        if self.credit == "step_groups" and algorithm in WITHOUT_GROUP_BASELINE:
            raise ValueError(
                f"step_groups compares the turns of a group, and {algorithm} has no baseline per group; use"
                " credit = 'turn', or an algorithm with one"
            )
        return self

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether a group whose members all earned the same has something to teach.

        What is the same under credit per turn is another question (``dataflow.operators.VarianceRule``).
        """
        penalised = self.kl_coef > 0 and self.kl_in == "reward"  # unequally, whatever was earned
        return self.algorithm in WITHOUT_GROUP_BASELINE or self.sft_coef > 0 or penalised

    @property
    def learns_from_groups_of_one(self) -> bool:
        """Whether a group of one member has something to teach.

        Not by a penalty in its reward, which has nothing to be compared with either; `step_groups` also compares the
        turns of one episode that saw the same.
        """
        return self.algorithm in WITHOUT_GROUP_BASELINE or self.sft_coef > 0 or self.credit == "step_groups"

    @property
    def kl_estimator_or_default(self) -> Literal["k1", "k2", "k3"]:
        """What each place is used with: k3 in the loss (GRPO), k1 in the reward (PPO)."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")


def _check_only_of(key: str, is_set: bool, algorithm: Algorithm, owners: tuple[Algorithm, ...]) -> None:
    if is_set and algorithm not in owners:
        raise ValueError(f"{key} is of {', '.join(owners)}, not of {algorithm}; leave it unset")
