"""What clients may lease: what the operator listed, since a spec names paths, addresses and keys of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.core.config.resources import WRITABLE, ResourcesConfig, is_below
from wingbeat.core.errors import PermissionDenied
from wingbeat.core.resource_reports import OTHER
from wingbeat.resources import (
    BoxSpec,
    DockerSpec,
    EndpointSpec,
    KubernetesSpec,
    ModelSpec,
    RaySpec,
    Reuse,
    Spec,
    parse_spec,
)

MAX_LABELS = 200
MAX_LABEL = 200
"""Characters."""


class Rules:
    """Of one server."""

    def __init__(self, config: ResourcesConfig, *, max_bytes: int) -> None:
        """``max_bytes``: what one answer may hold."""
        self._config = config
        self._max_bytes = max_bytes
        self._labels: set[str] = set()
        """Labels are anybody's to choose, and the pool counts each by itself."""

    def spec(self, data: Mapping[str, Any]) -> Spec:
        """A spec that may be leased.  Raises ConfigError for what is none, PermissionDenied for what is refused."""
        spec = parse_spec(data)
        self._check_kind(spec.kind)
        if isinstance(spec, BoxSpec):
            self._check_box(spec)
        if isinstance(spec, RaySpec):
            _refuse_if(spec.address, "address", "this server is connected to its own cluster: leave it out")
            self._check_kind(spec.box.kind)
            self._check_box(spec.box)
            self._check_sharing(spec)
        if isinstance(spec, EndpointSpec):
            for url in spec.urls:
                self._check_url(url, "urls")
            self._check_variable(spec.api_key_env, "api_key_env")
        if isinstance(spec, ModelSpec):
            self._check_url(spec.url, "url")
            self._check_variable(spec.key_env, "key_env")
        return self._labelled(spec)

    def _labelled(self, spec: Spec) -> Spec:
        if spec.label not in self._labels:
            if len(self._labels) >= MAX_LABELS or len(spec.label) > MAX_LABEL:
                return spec.model_copy(update={"label": OTHER})
            self._labels.add(spec.label)
        return spec

    def _check_kind(self, kind: str) -> None:
        kinds = self._config.kinds
        _refuse_if(kind not in kinds, "kind", f"{kind!r} is not lent here, but {', '.join(kinds)} (resources.kinds)")

    def _check_box(self, spec: BoxSpec) -> None:
        self._check_sharing(spec)
        _refuse_if(spec.network and not self._config.network, "network", "not allowed here (resources.network)")
        _refuse_if(
            spec.output_bytes > self._max_bytes // 2,  # base64, and both outputs
            "output_bytes",
            f"expected at most {self._max_bytes // 2}, what an answer can hold (server.max_body_bytes)",
        )
        most_s = self._config.max_command_s
        words = f"expected at most {most_s:g} (resources.max_command_s)"
        _refuse_if(spec.command_timeout_s > most_s, "command_timeout_s", words)
        for mount in spec.mounts:
            self._check_mount(mount.source, is_written=not mount.read_only)
        if isinstance(spec, DockerSpec):
            self._check_image(spec.image)
            _refuse_if(spec.host, "host", "this server has its own Docker daemon: leave it out")
        if isinstance(spec, KubernetesSpec):
            self._check_image(spec.image)
            _refuse_if(spec.context, "context", "this server has its own cluster: leave it out")
            believed = self._config.network_policies or not spec.network_policies
            _refuse_if(not believed, "network_policies", "this cluster has none (resources.network_policies)")
            _refuse_if(spec.service_account, "service_account", "not lent to clients: leave it out")
            allowed = self._config.namespaces
            words = f"{spec.namespace!r} is not lent here, but {', '.join(allowed)} (resources.namespaces)"
            _refuse_if(spec.namespace not in allowed, "namespace", words)

    def _check_sharing(self, spec: Spec) -> None:
        words = "a box is not shared between clients: expected never or after_reset"
        _refuse_if(spec.reuse is Reuse.SHARED, "reuse", words)

    def _check_mount(self, source: str, *, is_written: bool) -> None:
        real = Path(os.path.realpath(source))
        for mount in self._config.mounts:
            folder = Path(os.path.realpath(mount.removesuffix(WRITABLE)))
            if real.is_relative_to(folder) and (mount.endswith(WRITABLE) or not is_written):
                return
        how = "for writing " if is_written else ""
        raise PermissionDenied(f"mounts: {source!r} may not be mounted {how}here (resources.mounts)", param="mounts")

    def _check_image(self, image: str) -> None:
        for allowed in self._config.images:
            if image == allowed or (allowed.endswith("*") and image.startswith(allowed[:-1])):
                return
        raise PermissionDenied(f"image: {image!r} is not allowed here (resources.images)", param="image")

    def _check_url(self, url: str, field: str) -> None:
        if not any(is_below(url, allowed) for allowed in self._config.urls):
            raise PermissionDenied(f"{field}: {url} is not called from here (resources.urls)", param=field)

    def _check_variable(self, name: str, field: str) -> None:
        if name and name not in self._config.key_variables:
            raise PermissionDenied(f"{field}: {name} is not lent here (resources.key_variables)", param=field)


def _refuse_if(fault: object, field: str, words: str) -> None:
    if fault:
        raise PermissionDenied(f"{field}: {words}", param=field)
