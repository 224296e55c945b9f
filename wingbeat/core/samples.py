"""What the dataflow hands to a trainer, as compact wire values.

Per-token arrays are little-endian byte strings (no object per token), because they travel through
the ledger, the worker protocol and back.  Index legend: ``T`` = tokens of one timeline.

A worked instance: turns ``[1,2] -> [10,11]`` and ``[1,2,10,11,20] -> [30]`` form one timeline::

    token_ids  1  2 10 11 20 30
    sampled    0  0  1  1  0  1
    versions  -1 -1  4  4 -1  5

``sampled[t]`` says that token ``t`` itself was drawn by the policy; the logit that explains it
stands at position ``t - 1``.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

INT_DTYPE = np.dtype("<i4")
FLOAT_DTYPE = np.dtype("<f4")
BYTE_DTYPE = np.dtype("u1")


class TrainingSample(msgspec.Struct, frozen=True):
    """One timeline of one episode for one policy; its sampled tokens occur in no other sample."""

    sample_id: str
    token_ids: bytes
    """int32 [T]."""
    sampled: bytes
    """uint8 [T], 1 where the token trains."""
    sampling_logprobs: bytes
    """float32 [T], 0 where not sampled; after temperature."""
    versions: bytes
    """int32 [T], policy version per sampled token, -1 elsewhere."""
    temperature: float = 1.0
    turn_ids: tuple[str, ...] = ()
    """The turns whose sampled tokens train here, in order."""
    turn_starts: tuple[int, ...] = ()
    """Where each of them begins: the position of its first sampled token, trained or not."""
    support_table: tuple[bytes, ...] = ()
    """Distinct :mod:`wingbeat.core.support` blobs."""
    support_index: bytes = b""
    """int32 [T], each trained token's place in the table, -1 for the whole vocabulary; b"" means -1 everywhere."""

    @classmethod
    def build(
        cls,
        sample_id: str,
        *,
        token_ids: NDArray[np.int32],
        sampled: NDArray[np.uint8],
        sampling_logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        temperature: float = 1.0,
        turn_ids: tuple[str, ...] = (),
        turn_starts: tuple[int, ...] = (),
        support_table: tuple[bytes, ...] = (),
        support_index: NDArray[np.int32] | None = None,
    ) -> TrainingSample:
        """Pack arrays of equal length [T]; raises ValueError where lengths differ."""
        lengths = {len(token_ids), len(sampled), len(sampling_logprobs), len(versions)}
        if support_index is not None:
            lengths.add(len(support_index))
        if len(lengths) != 1:
            raise ValueError(f"sample {sample_id}: per-token arrays must have one length, got {sorted(lengths)}")
        return cls(
            sample_id=sample_id,
            token_ids=np.asarray(token_ids, INT_DTYPE).tobytes(),
            sampled=np.asarray(sampled, BYTE_DTYPE).tobytes(),
            sampling_logprobs=np.asarray(sampling_logprobs, FLOAT_DTYPE).tobytes(),
            versions=np.asarray(versions, INT_DTYPE).tobytes(),
            temperature=temperature,
            turn_ids=turn_ids,
            turn_starts=turn_starts,
            support_table=support_table,
            support_index=b"" if support_index is None else np.asarray(support_index, INT_DTYPE).tobytes(),
        )

    @property
    def tokens_T(self) -> NDArray[np.int32]:
        return np.frombuffer(self.token_ids, INT_DTYPE)

    @property
    def sampled_T(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.sampled, BYTE_DTYPE)

    @property
    def sampling_logprobs_T(self) -> NDArray[np.float32]:
        return np.frombuffer(self.sampling_logprobs, FLOAT_DTYPE)

    @property
    def versions_T(self) -> NDArray[np.int32]:
        return np.frombuffer(self.versions, INT_DTYPE)

    @property
    def support_index_T(self) -> NDArray[np.int32]:
        if not self.support_index:
            return np.full(self.num_tokens, -1, np.int32)
        return np.frombuffer(self.support_index, INT_DTYPE)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // INT_DTYPE.itemsize

    @property
    def num_sampled(self) -> int:
        return int(self.sampled_T.sum())

    @property
    def min_version(self) -> int | None:
        """The lowest version among the sampled tokens, which is what staleness is measured from."""
        versions = self.versions_T[self.sampled_T.astype(bool)]
        return int(versions.min()) if versions.size else None


class TurnCredit(msgspec.Struct, frozen=True, array_like=True):
    """What one turn earned by itself, and where it stands in the tree of its agent's turns."""

    turn_id: str
    parent_id: str = ""
    """The turn whose tokens this one extends; "" for a root."""
    reward: float = 0.0
    """Reported for this very turn; part of the agent's ``reward``, too."""
    state: str = ""
    """Digest of what the policy saw (its whole prompt): turns of equal state are comparable."""


class EpisodeSamples(msgspec.Struct, frozen=True):
    """All samples of one (episode attempt, policy, agent) with the reward that credits them."""

    episode_id: str
    attempt: int
    group_id: str
    policy: str
    agent: str
    """Baselines are keyed by (group, policy, agent); "" where the caller named none."""
    reward: float
    """As reported: of the agent as a whole, those of its turns included."""
    samples: tuple[TrainingSample, ...]
    truncated: bool = False
    """Some turn ended with finish_reason "length"."""
    turns: tuple[TurnCredit, ...] = ()
    """All of the agent's turns of this policy, in order of their commit."""
    source: str = ""
    """The source of the episode's task."""
    task_id: str = ""
    shaping: float = 0.0
    """What operators added to the reward; measured apart, so that people see what was reported."""
    masked: int = 0
    """Sampled tokens that were taken out of training for their age."""

    @property
    def shaped_reward(self) -> float:
        """What advantages are computed from."""
        return self.reward + self.shaping

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.samples)

    @property
    def min_version(self) -> int | None:
        found = [v for s in self.samples if (v := s.min_version) is not None]
        return min(found, default=None)


class TrainingBatch(msgspec.Struct, frozen=True):
    """The ordered content of one optimiser step, logged before it is taken."""

    batch_id: str
    policy: str
    step: int
    """The step this batch produces: training it moves the policy from version step-1 to step."""
    episodes: tuple[EpisodeSamples, ...]
    seed: int
    """Seeds everything random inside the step, so that replay is exact."""
    lineage: int = 0
    """The lineage in which the step is taken; a rollback begins the next one."""
    replayed: tuple[tuple[str, int], ...] = ()
    """(episode id, attempt) of the members that an earlier batch trained already, by the replay operator."""
