"""Resources: tools, environments and other helpers that episodes lease and give back.

``LocalPool`` hands out in-process objects; it implements :class:`wingbeat.core.ports.ResourcePool`.
"""

from wingbeat.resources.local import LocalLease, LocalPool
from wingbeat.resources.specs import LocalSpec, ResourceFailed, Reuse
from wingbeat.resources.states import ResourceState

__all__ = ["LocalLease", "LocalPool", "LocalSpec", "ResourceFailed", "ResourceState", "Reuse"]
