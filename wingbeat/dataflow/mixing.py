"""Which task source deals next: stride scheduling by ratio (Waldspurger and Weihl 1995), pure arithmetic.

A source of weight ``w`` advances its *pass* by ``1 / w`` with every group dealt, and the lowest pass deals next: over
time each source gets groups in proportion to its weight.  A group that did not count gives its step back.

A source is *ahead* of its share by ``w * (pass - mean)``, where ``mean`` is the average pass weighted by ``w``: with
all passes begun at 0, a source has had ``n = w * pass`` of ``N`` groups, and ``n - (w / W) * N`` is just that.  Where
clients run only some sources, nobody may be ahead by more than ``slack / (k - 1)`` groups, ``k`` being the number of
sources.  What one lacks the others are ahead, so nobody is behind by more than ``slack`` groups either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wingbeat.core.errors import RequestError

SUM_TOLERANCE = 1e-6
MIN_SHARE = 1e-6
"""A smaller one is no share of any run, and its inverse, the step of a pass, may be too large for a number."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Claim:
    """A source that takes part."""

    name: str
    weight: float
    """Its ratio, or the number of its tasks; above 0."""
    pass_: float


def mean_pass(claims: Sequence[Claim]) -> float:
    """The pass of a source that is just where its share puts it, weighted by shares; 0 where nobody has one."""
    total = math.fsum(claim.weight for claim in claims)
    return math.fsum(claim.weight * claim.pass_ for claim in claims) / total if total > 0 else 0.0


def ahead(claims: Sequence[Claim]) -> dict[str, float]:
    """By how many groups each source is ahead of its share; negative where it is behind.  They sum to 0."""
    mean = mean_pass(claims)
    return {claim.name: claim.weight * (claim.pass_ - mean) for claim in claims}


def choose(claims: Sequence[Claim], *, among: Sequence[str], slack: float | None) -> str | None:
    """The source that deals next out of ``among``; None where each of them would be too far ahead.

    ``slack`` None lets a source run ahead without bound.  Whoever is furthest behind is never held back: dealt once,
    it is ahead by less than 1.
    """
    total = math.fsum(claim.weight for claim in claims)
    leads = ahead(claims)
    allowed = [
        claim
        for claim in claims
        if claim.name in among
        and may_lead(leads[claim.name], share=claim.weight / total, num_claims=len(claims), slack=slack)
    ]
    return min(allowed, key=lambda claim: (claim.pass_, claim.name)).name if allowed else None


def may_lead(lead: float, *, share: float, num_claims: int, slack: float | None) -> bool:
    """Whether one of so many claims, which is ``lead`` groups ahead of its ``share``, may have another group."""
    bound = math.inf if slack is None else max(1.0, slack / max(1, num_claims - 1))
    # a group raises a lead by 1, less what the group adds to the share
    return lead + 1 - share <= bound + _ROUNDING


def check_ratios(ratios: Mapping[str, float], *, sources: Sequence[str]) -> None:
    """Raises RequestError unless the ratios are shares of exactly these sources."""
    unknown = sorted(set(ratios) - set(sources))
    if unknown:
        known = ", ".join(sorted(sources)) or "none"
        raise RequestError(f"no training tasks of source {unknown[0]!r}; sources are: {known}", param="ratios")
    left_out = sorted(set(sources) - set(ratios))
    if left_out:
        raise RequestError(
            f"`ratios` leave out source {left_out[0]!r}; give it a share, or 0 to deal none of it", param="ratios"
        )
    tiny = next((source for source, ratio in ratios.items() if 0 < ratio < MIN_SHARE), None)
    if tiny is not None:
        raise RequestError(
            f"the share of {tiny!r} is {ratios[tiny]:g}; expected {MIN_SHARE:g} or more, or 0 to deal none of it",
            param="ratios",
        )
    total = math.fsum(ratios.values())
    if any(not ratio >= 0 for ratio in ratios.values()) or not abs(total - 1) <= SUM_TOLERANCE:
        shown = ", ".join(f"{source} = {ratio:g}" for source, ratio in ratios.items())
        raise RequestError(
            f"`ratios` must be 0 or more and sum to 1, got {shown}, which sums to {total:g}", param="ratios"
        )


def with_share(ratios: Mapping[str, float], source: str, share: float) -> dict[str, float]:
    """A source joins with a share; the others keep their proportions in what is left.

    Where all of the others have 0, they keep it, and the source gets everything, unless its share is 0, too.
    """
    rest = math.fsum(ratio for name, ratio in ratios.items() if name != source)
    if rest == 0:
        return {**ratios, source: 1.0 if share > 0 else 0.0}
    scaled = {name: ratio / rest * (1 - share) for name, ratio in ratios.items() if name != source}
    return {**scaled, source: share}


def with_configured(ratios: Mapping[str, float], source: str, configured: Mapping[str, float]) -> dict[str, float]:
    """A source of the configuration comes back with its configured share.

    Where the others mix as configured, too, all do so again, in whatever order several come back.  One that was
    configured to have everything shares equally with those that came since.
    """
    others = {name: configured[name] for name in ratios if name in configured}
    mix = without(others, source)
    if len(others) == len(ratios) and all(math.isclose(ratios[name], mix.get(name, 0.0)) for name in ratios):
        total = math.fsum(others.values()) + configured[source]
        return {
            name: share / total if total > 0 else 0.0 for name, share in {**others, source: configured[source]}.items()
        }
    share = configured[source] if configured[source] < 1 else 1 / (len(ratios) + 1)
    return with_share(ratios, source, share)


def without(ratios: Mapping[str, float], source: str) -> dict[str, float]:
    """A source leaves; the others keep their proportions, and a share of 0 stays 0 even where nobody has more.

    {} (sizes decide) where it was the last one.
    """
    rest = math.fsum(ratio for name, ratio in ratios.items() if name != source)
    return {name: ratio / rest if rest > 0 else 0.0 for name, ratio in ratios.items() if name != source}
