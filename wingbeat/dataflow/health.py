"""Alarms: what the metrics of a run's steps say about its health, while there is still something to save.

A :class:`HealthMonitor` is fed the metrics of each step of one policy and says which alarms began and which
ended. It is pure: the server tells people, and stops training where the configuration says so.

A check that lacks a metric it needs (a batch without on-policy tokens has no ``mismatch_kl/on_policy``) leaves
its alarm as it was. The windows of the first steps begin anew with each process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wingbeat.core.config.health import EntropyAlarm, HackingAlarm, HealthConfig, Reaction

Metrics = Mapping[str, float]
MISMATCH_LIMITS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""By the dtype of the policy: what rounding alone makes of equal weights stays well below."""
FAR_BEYOND = 10.0
"""Times the limit: such a mismatch needs no second step to confirm it.  Where training runs ahead of slow tools, only
the first batch of a run holds tokens of the very weights that train, so there may be no second one."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something is wrong with a policy's training."""

    name: str
    text: str
    """What was seen, against which limit, and what to do about it."""
    value: float
    limit: float
    action: Literal["warn", "stop"]


@dataclass(frozen=True, slots=True)
class Report:
    """What a step's metrics changed."""

    began: tuple[Alarm, ...] = ()
    ended: tuple[str, ...] = ()
    """Names of alarms that are over."""

    @property
    def stop(self) -> Alarm | None:
        """The alarm that ends training, if one does."""
        return next((alarm for alarm in self.began if alarm.action == "stop"), None)


@dataclass(frozen=True, slots=True)
class Finding:
    """A value beyond its limit."""

    value: float
    limit: float
    text: str


Check = Callable[[Metrics], "Finding | Literal['fine', 'unknown']"]


class HealthMonitor:
    """The alarms of one policy."""

    def __init__(self, config: HealthConfig, *, dtype: str, max_staleness: int) -> None:
        """``dtype``: the policy's, ``"float32"`` or ``"bfloat16"``."""
        self._watched: dict[str, tuple[Reaction, Check]] = {
            "mismatch": (config.mismatch.action, _Mismatch(config, dtype=dtype)),
            "ratio": (config.ratio.action, _Ratio(config)),
            "entropy": (config.entropy.action, _Entropy(config.entropy)),
            "gradient": (config.gradient.action, _Gradient(config)),
            "memory": (config.memory.action, _memory),
            "tokens": (config.tokens.action, _Tokens(config)),
            "hacking": (config.hacking.action, _Hacking(config.hacking)),
            "staleness": (config.staleness.action, _Staleness(max_staleness)),
        }
        self._active: dict[str, Alarm] = {}

    @property
    def names(self) -> Sequence[str]:
        """Of all alarms that are watched for."""
        return tuple(name for name, (action, _) in self._watched.items() if action != "off")

    @property
    def active(self) -> tuple[Alarm, ...]:
        """Alarms that have begun and not ended, each with its newest value."""
        return tuple(self._active.values())

    def observe(self, metrics: Metrics) -> Report:
        """Take the metrics of one step, in order of the steps."""
        began: list[Alarm] = []
        ended: list[str] = []
        for name, (action, check) in self._watched.items():
            if action == "off":
                continue
            found = check(metrics)
            if isinstance(found, Finding):
                alarm = Alarm(name, found.text, value=found.value, limit=found.limit, action=action)
                if name not in self._active:
                    began.append(alarm)
                self._active[name] = alarm
            elif found == "fine" and self._active.pop(name, None) is not None:
                ended.append(name)
        return Report(tuple(began), tuple(ended))


class _Streak:
    """Counts steps in a row."""

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._count = 0

    def reaches(self, is_beyond: bool) -> bool:
        self._count = self._count + 1 if is_beyond else 0
        return self._count >= self._needed


class _Mismatch:
    """At equal weights both must give a token the same probability, whatever it was sampled with."""

    def __init__(self, config: HealthConfig, *, dtype: str) -> None:
        limit = config.mismatch.limit
        self._limit = MISMATCH_LIMITS[dtype] if limit is None else limit
        self._streak = _Streak(config.mismatch.patience)

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        value = metrics.get("mismatch_kl/on_policy")
        if value is None:
            return "unknown"
        if not self._streak.reaches(not value <= self._limit) and not value > FAR_BEYOND * self._limit:
            return "fine" if value <= self._limit else "unknown"
        return Finding(
            value,
            self._limit,
            f"engine and trainer disagree about tokens of the same version: KL {value:.2g}, limit {self._limit:.2g}."
            " The engine serves other weights, another precision, temperature or support than it says: compare"
            " `served_checksum` and `published_checksum` in /api/policies, `dtype` and `engine.kv_on_update`",
        )


class _Ratio:
    def __init__(self, config: HealthConfig) -> None:
        self._limit = config.ratio.limit
        self._streak = _Streak(config.ratio.patience)

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        value = metrics.get("ratio/max")
        if value is None:
            return "unknown"
        if not self._streak.reaches(not value <= self._limit):
            return "fine" if value <= self._limit else "unknown"
        return Finding(
            value,
            self._limit,
            f"some token is {value:.3g} times as probable as when it was sampled, limit {self._limit:g}: lower"
            " `learning_rate` or `dataflow.max_staleness`, or set `tis_cap` or `mis_high`",
        )


class _Trend:
    """Means of a metric over the first and over the last steps."""

    def __init__(self, window: int) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=window)
        self._window = window

    def add(self, value: float) -> None:
        if len(self._first) < self._window:
            self._first.append(value)
        self._last.append(value)

    @property
    def early(self) -> float:
        return _mean(self._first)

    @property
    def late(self) -> float:
        return _mean(self._last)


def _mean(values: Collection[float]) -> float:
    """NaN where infinities of both signs meet: ``statistics.fmean`` raises there."""
    return sum(values) / len(values)


class _Entropy:
    """Entropy falls in every run that learns; it is a collapse where the reward did not rise for it."""

    def __init__(self, config: EntropyAlarm) -> None:
        self._config = config
        self._entropy, self._reward = _Trend(config.window), _Trend(config.window)
        self._steps = 0

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        if "entropy" not in metrics or "reward/mean" not in metrics:
            return "unknown"
        self._entropy.add(metrics["entropy"])
        self._reward.add(metrics["reward/mean"])
        self._steps += 1
        if self._steps < 2 * self._config.window:
            return "unknown"
        value, limit = self._entropy.late, self._config.share * self._entropy.early
        gain = self._reward.late - self._reward.early
        if value >= self._config.floor and (value >= limit or gain >= self._config.min_gain):
            return "fine"
        limit = max(limit, self._config.floor)
        return Finding(
            value,
            limit,
            f"the entropy fell to {value:.3g} (first {self._entropy.early:.3g}, limit {limit:.3g}) while the reward"
            f" moved by {gain:+.3g}: the policy says the same thing whatever it is asked. Lower `learning_rate`, set"
            " `entropy_coef`, raise `clip_high`, or go back to an earlier checkpoint",
        )


class _Gradient:
    def __init__(self, config: HealthConfig) -> None:
        self._streak = _Streak(config.gradient.patience)
        self._steps = config.gradient.patience

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        if skipped := metrics.get("skipped_steps", 0.0):
            return Finding(
                skipped,
                0.0,
                f"a gradient was not finite, and its update was skipped ({skipped:.0f} steps in a row, and after"
                " `trainer.max_skipped_steps` training ends): lower `learning_rate`, look at `ratio/max`, or go back to"
                " an earlier checkpoint",
            )
        value = metrics.get("grad_norm")
        if value is None:
            return "unknown"
        if not self._streak.reaches(value == 0.0):
            return "fine" if value else "unknown"
        return Finding(
            value,
            0.0,
            f"the gradient was zero for {self._steps} steps: nothing is learnt. Are all rewards of each group equal"
            " (`frac_reward_zero_std`), or are all tokens clipped or masked (`clip_ratio/*`, `correction/*`)?",
        )


def _memory(metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
    """Of forwards that did not fit; the trainer has made them smaller already, so what is left to do is to say so."""
    retries = metrics.get("perf/oom_retries")
    if retries is None:
        return "unknown"
    if not retries:
        return "fine"
    tokens = metrics.get("perf/micro_batch_tokens", 0.0)
    return Finding(
        retries,
        0.0,
        f"a training step ran out of memory {retries:.0f} times and was repeated in forwards of at most {tokens:.0f}"
        f" tokens; set `trainer.micro_batch_tokens` to {tokens:.0f}, so that no step is begun in vain",
    )


class _Tokens:
    def __init__(self, config: HealthConfig) -> None:
        self._config = config.tokens

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        trained = metrics.get("trained_tokens")
        if trained is None:
            return "unknown"
        excluded = metrics.get("excluded_tokens", 0.0)
        share = excluded / (trained + excluded) if excluded else 0.0
        if trained < self._config.min_trained:
            text = f"a batch trained {trained:.0f} tokens, expected at least {self._config.min_trained}"
            return Finding(trained, self._config.min_trained, f"{text}: see `wingbeat inspect RUN_DIR EPISODE`")
        if share <= self._config.excluded_share:
            return "fine"
        return Finding(
            share,
            self._config.excluded_share,
            f"{share:.0%} of a batch's sampled tokens cannot train, limit {self._config.excluded_share:.0%}: they have"
            " no usable logprob or lie outside of their support; `wingbeat inspect RUN_DIR EPISODE` shows which",
        )


class _Hacking:
    """A hint, no proof: lengths and rewards may rise together for good reasons."""

    def __init__(self, config: HackingAlarm) -> None:
        self._config = config
        self._length, self._reward = _Trend(config.window), _Trend(config.window)
        self._steps = 0

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        length = metrics.get("batch/tokens_per_episode")
        if length is None or "reward/mean" not in metrics:
            return "unknown"
        self._length.add(length)
        self._reward.add(metrics["reward/mean"])
        self._steps += 1
        if self._steps < 2 * self._config.window or not self._length.early:
            return "unknown"
        growth = self._length.late / self._length.early
        if growth < self._config.length_ratio or self._reward.late <= self._reward.early:
            return "fine"
        return Finding(
            growth,
            self._config.length_ratio,
            f"episodes have {growth:.1f} times the tokens of the first steps, and the reward rose with them: read some"
            " (`wingbeat inspect RUN_DIR`) before you believe it; `overlong_shaping` and `length_filter` bound lengths",
        )


class _Staleness:
    def __init__(self, bound: int) -> None:
        self._bound = bound

    def __call__(self, metrics: Metrics) -> Finding | Literal["fine", "unknown"]:
        value = metrics.get("staleness/max")
        if value is None:
            return "unknown"
        if value <= self._bound:
            return "fine"
        return Finding(
            value,
            self._bound,
            f"a batch held tokens {value:.0f} versions old, the bound is {self._bound}: this is a defect of Wingbeat,"
            " please report it",
        )
