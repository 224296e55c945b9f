"""Resources: tools, environments and other helpers that episodes lease and give back.

:class:`Resources` is the pool; it implements :class:`wingbeat.core.ports.ResourcePool`.
"""

from wingbeat.resources.backend import Backend, Backends, Instance, Priced
from wingbeat.resources.boxes import Box, Finished
from wingbeat.resources.budgets import Budgets
from wingbeat.resources.ledger import state_folder
from wingbeat.resources.meters import Meters, RateLimiter
from wingbeat.resources.pool import Resources, of_process
from wingbeat.resources.pool_leases import Lease
from wingbeat.resources.reaper import Reaped, reap
from wingbeat.resources.specs import (
    BoxSpec,
    Draw,
    LocalSpec,
    Mount,
    Needs,
    ResourceFailed,
    ResourceLost,
    ResourceWait,
    Reuse,
    SandboxSpec,
    Spec,
    SubprocessSpec,
    UnsupportedField,
)
from wingbeat.resources.specs_remote import (
    DockerSpec,
    EndpointSpec,
    KubernetesSpec,
    ModelSpec,
    RaySpec,
    WireSpec,
    parse_spec,
)
from wingbeat.resources.states import ResourceState
from wingbeat.resources.stats import BudgetStats, ClassStats, Timing
from wingbeat.resources.sync import SyncLease, SyncResources

__all__ = [
    "Backend",
    "Backends",
    "Box",
    "BoxSpec",
    "BudgetStats",
    "Budgets",
    "ClassStats",
    "DockerSpec",
    "Draw",
    "EndpointSpec",
    "Finished",
    "Instance",
    "KubernetesSpec",
    "Lease",
    "LocalSpec",
    "Meters",
    "ModelSpec",
    "Mount",
    "Needs",
    "Priced",
    "RateLimiter",
    "RaySpec",
    "Reaped",
    "ResourceFailed",
    "ResourceLost",
    "ResourceState",
    "ResourceWait",
    "Resources",
    "Reuse",
    "SandboxSpec",
    "Spec",
    "SubprocessSpec",
    "SyncLease",
    "SyncResources",
    "Timing",
    "UnsupportedField",
    "WireSpec",
    "of_process",
    "parse_spec",
    "reap",
    "state_folder",
]
