"""What clients may lease: what the operator listed, since a spec names paths, addresses and keys of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from wingbeat.core.config.resources import WRITABLE, ResourcesConfig, is_below
from wingbeat.core.errors import PermissionDenied
from wingbeat.core.resource_reports import OTHER
from wingbeat.resources import (
    BoxSpec,
    DockerSpec,
    EndpointSpec,
    KubernetesSpec,
    ModelSpec,
    Mount,
    RaySpec,
    Reuse,
    Spec,
    parse_spec,
)

B = TypeVar("B", bound=BoxSpec)

MAX_LABELS = 200
MAX_LABEL = 200
"""Characters."""
MAX_START_S = 3600.0
MAX_CLEAN_S = 600.0
"""Of a reset and of closing: so long the place of a box may be nobody's, and so long the server's own end may take."""


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
        _check_times(spec)
        if isinstance(spec, BoxSpec):
            self._check_box(spec)
            _check_needs(spec)
            spec = self._with_real_mounts(spec)
        if isinstance(spec, RaySpec):
            _refuse_if(spec.address, "address", "this server is connected to its own cluster: leave it out")
            _check_times(spec.box)
            self._check_kind(spec.box.kind)
            self._check_box(spec.box)
            self._check_sharing(spec)
            if spec.box.mounts:
                spec = spec.model_copy(update={"box": self._with_real_mounts(spec.box)})
        if isinstance(spec, EndpointSpec):
            self._check_urls(spec.urls, "urls")
            self._check_variable(spec.api_key_env, spec.urls, "api_key_env")
        if isinstance(spec, ModelSpec):
            self._check_urls([spec.url], "url")
            self._check_variable(spec.key_env, [spec.url], "key_env")
        return self._labelled(spec)

    def _labelled(self, spec: Spec) -> Spec:
        if spec.label not in self._labels:
            if len(self._labels) >= MAX_LABELS or len(spec.label) > MAX_LABEL:
                return spec.model_copy(update={"label": OTHER})
            self._labels.add(spec.label)
        return spec

    def _check_kind(self, kind: str) -> None:
        kinds = self._config.kinds
        _refuse_if(kind not in kinds, "kind", f"{kind!r} is not lent here, but {', '.join(kinds)}", by="kinds")

    def _check_box(self, spec: BoxSpec) -> None:
        self._check_sharing(spec)
        _refuse_if(spec.network and not self._config.network, "network", "boxes have none here", by="network")
        _refuse_if(
            spec.output_bytes > self._max_bytes // 2,  # base64, and both outputs
            "output_bytes",
            f"expected at most {self._max_bytes // 2}, what an answer can hold (server.max_body_bytes / 2)",
        )
        most_s = self._config.max_command_s
        words = f"expected at most {most_s:g}, got {spec.command_timeout_s:g}"
        _refuse_if(spec.command_timeout_s > most_s, "command_timeout_s", words, by="max_command_s")
        if isinstance(spec, DockerSpec):
            self._check_image(spec.image)
            _refuse_if(spec.host, "host", "this server has its own Docker daemon: leave it out")
        if isinstance(spec, KubernetesSpec):
            self._check_image(spec.image)
            _refuse_if(spec.context, "context", "this server has its own cluster: leave it out")
            believed = self._config.network_policies or not spec.network_policies
            _refuse_if(not believed, "network_policies", "nobody says that this cluster has any", by="network_policies")
            _refuse_if(spec.service_account, "service_account", "not lent to clients: leave it out")
            allowed = self._config.namespaces
            words = f"{spec.namespace!r} is not lent here, but {', '.join(allowed)}"
            _refuse_if(spec.namespace not in allowed, "namespace", words, by="namespaces")

    def _with_real_mounts(self, spec: B) -> B:
        if not spec.mounts:
            return spec
        return spec.model_copy(update={"mounts": tuple(self._real_mount(mount) for mount in spec.mounts)})

    def _check_sharing(self, spec: Spec) -> None:
        words = "a box is not shared between clients: expected never or after_reset"
        _refuse_if(spec.reuse is Reuse.SHARED, "reuse", words)

    def _real_mount(self, mount: Mount) -> Mount:
        """With its links resolved, and none that a box could put there before this one starts: of a folder that boxes
        write to nothing within is mounted."""
        real = Path(os.path.realpath(mount.source))
        folders = {Path(os.path.realpath(m.removesuffix(WRITABLE))): m.endswith(WRITABLE) for m in self._config.mounts}
        within = [folder for folder in folders if real.is_relative_to(folder)]
        is_inside = any(folders[folder] and folder != real for folder in within)
        words = f"{mount.source!r} is within a folder that boxes write to: mount that folder"
        _refuse_if(is_inside, "mounts", words)
        is_allowed = any(mount.read_only or folders[folder] for folder in within)
        words = f"{mount.source!r} may not be mounted {'' if mount.read_only else 'for writing '}here"
        _refuse_if(not is_allowed, "mounts", words, by="mounts")
        return mount.model_copy(update={"source": str(real)})

    def _check_image(self, image: str) -> None:
        for allowed in self._config.images:
            if image == allowed or (allowed.endswith("*") and image.startswith(allowed[:-1])):
                return
        _refuse_if(True, "image", f"{image!r} is not lent here", by="images")

    def _check_urls(self, urls: Sequence[str], field: str) -> None:
        for url in urls:
            is_listed = any(is_below(url, allowed) for allowed in self._config.urls)
            _refuse_if(not is_listed, field, f"{url} is not called from here", by="urls")

    def _check_variable(self, name: str, urls: Sequence[str], field: str) -> None:
        """A key goes only where its owner wants it: each other address could keep it."""
        if not name:
            return
        places = self._config.key_variables.get(name, ())
        _refuse_if(not places, field, f"{name} is not lent here", by="key_variables")
        for url in urls:
            is_for = any(is_below(url, place) for place in places)
            _refuse_if(not is_for, field, f"{name} is not sent to {url}", by="key_variables")


def _check_times(spec: Spec) -> None:
    for field, most_s in (
        ("start_timeout_s", MAX_START_S),
        ("reset_timeout_s", MAX_CLEAN_S),
        ("close_timeout_s", MAX_CLEAN_S),
    ):
        given_s = getattr(spec, field)
        words = f"expected at most {most_s:g}, since others may wait for its place; got {given_s:g}"
        _refuse_if(given_s > most_s, field, words)


def _check_needs(spec: BoxSpec) -> None:
    """What counts against the budgets is no less than what the box may take."""
    if spec.needs is None:
        return
    cpus, memory_mb = spec.cpus or 0.0, spec.memory_mb or 0
    words = f"expected at least what the box may take (cpus = {cpus:g}, memory_mb = {memory_mb}): leave needs out"
    _refuse_if(spec.needs.cpus < cpus or spec.needs.memory_mb < memory_mb, "needs", words)


def _refuse_if(fault: object, field: str, words: str, *, by: str = "") -> None:
    """``by``: the key of the configuration that decides."""
    if fault:
        how = f"; who runs this server may allow it (resources.{by})" if by else ""
        raise PermissionDenied(f"{field}: {words}{how}", param=field)
