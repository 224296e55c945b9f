"""Operators: what happens to a closed group before it may train (docs/operators.md).

To write one, extend :class:`Operator`; everything that it needs is importable from here.
"""

from wingbeat.dataflow.operators.base import Operator, OperatorContext, OperatorFault, OperatorOptions
from wingbeat.dataflow.operators.chain import MAX_REFUSALS, ChainOutcome, Fault, Link, OperatorChain
from wingbeat.dataflow.operators.outcomes import counts_in_group
from wingbeat.dataflow.operators.registry import BUILT_IN, absolute_use, build_chain, check_operators
from wingbeat.dataflow.operators.variance import VarianceRule, has_zero_variance
from wingbeat.dataflow.operators.views import (
    AgentView,
    BatchView,
    Decision,
    Drop,
    EpisodeKey,
    EpisodeView,
    GroupView,
    PastGroup,
    Shape,
)

__all__ = [
    "BUILT_IN",
    "MAX_REFUSALS",
    "AgentView",
    "BatchView",
    "ChainOutcome",
    "Decision",
    "Drop",
    "EpisodeKey",
    "EpisodeView",
    "Fault",
    "GroupView",
    "Link",
    "Operator",
    "OperatorChain",
    "OperatorContext",
    "OperatorFault",
    "OperatorOptions",
    "PastGroup",
    "Shape",
    "VarianceRule",
    "absolute_use",
    "build_chain",
    "check_operators",
    "counts_in_group",
    "has_zero_variance",
]
