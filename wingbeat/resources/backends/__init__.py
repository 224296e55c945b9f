"""Back-ends by kind, made when first used: optional libraries are imported nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from wingbeat.core.errors import ConfigError
from wingbeat.resources.backend import Backend

_MADE_BY: Mapping[str, str] = {
    "local": "wingbeat.resources.backends.local:LocalBackend",
    "subprocess": "wingbeat.resources.backends.subprocess:SubprocessBackend",
    "sandbox": "wingbeat.resources.backends.sandbox:SandboxBackend",
    "docker": "wingbeat.resources.backends.docker:DockerBackend",
    "kubernetes": "wingbeat.resources.backends.kubernetes:KubernetesBackend",
    "ray": "wingbeat.resources.backends.ray:RayBackend",
    "endpoint": "wingbeat.resources.backends.endpoint:EndpointBackend",
    "model": "wingbeat.resources.backends.model:ModelBackend",
}


class LazyBackends(Mapping[str, Backend]):
    """Makes a kind's back-end when it is asked for the first time; knows those it has made."""

    def __init__(self, made_by: Mapping[str, str] = _MADE_BY) -> None:
        self._made_by = made_by
        self.made: dict[str, Backend] = {}

    def __getitem__(self, kind: str) -> Backend:
        """Raises ConfigError for an unknown kind, DependencyMissing where its library is not installed."""
        if kind not in self.made:
            if kind not in self._made_by:
                raise ConfigError(f"kind: expected one of {', '.join(sorted(self._made_by))}, got {kind!r}")
            module, _, name = self._made_by[kind].partition(":")
            self.made[kind] = getattr(import_module(module), name)()
        return self.made[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made_by)

    def __len__(self) -> int:
        return len(self._made_by)


def default_backends() -> LazyBackends:
    """All kinds that Wingbeat knows."""
    return LazyBackends()
