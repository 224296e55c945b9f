"""The filter before all operators: which episodes may be members of a group at all."""

from __future__ import annotations

from wingbeat.core.types import Outcome
from wingbeat.dataflow.records import EpisodeRecord


def counts_in_group(record: EpisodeRecord) -> bool:
    """Only episodes that ran to their own end may reach a baseline.

    A failure of ours or of the environment says nothing about the policy; scored as 0 it would teach
    the policy to avoid whatever broke.
    """
    return record.outcome is Outcome.AGENT
