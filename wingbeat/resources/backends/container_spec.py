"""What the specs of containers ask for that Docker and Kubernetes honour alike, and what neither can."""

from __future__ import annotations

from wingbeat.resources.specs import BoxSpec, Reuse, UnsupportedField

MIN_DISK_MB = 8
SMALL_PART = 8
"""A so-manieth part of ``disk_mb`` is that of /tmp, another that of /dev/shm; the rest is the workdir's."""


def check_box(spec: BoxSpec) -> None:
    """What no container can honour.  Raises UnsupportedField."""
    if spec.cpu_s is not None:
        raise UnsupportedField(
            spec.kind, "cpu_s", "a container counts processor time of all its commands: use command_timeout_s and cpus"
        )
    if spec.process_memory_mb is not None:
        raise UnsupportedField(spec.kind, "process_memory_mb", "memory_mb holds for all processes of a container")
    if spec.reuse is Reuse.SHARED:
        raise UnsupportedField(spec.kind, "reuse", "a box has one holder: never or after_reset")
    if spec.disk_mb is not None and spec.disk_mb < MIN_DISK_MB:
        raise UnsupportedField(spec.kind, "disk_mb", f"at least {MIN_DISK_MB} are divided between its folders")
    if spec.workdir in ("/", "/tmp", "/dev/shm", "/proc", "/sys", "/dev"):
        raise UnsupportedField(spec.kind, "workdir", "it is a folder of its own, such as /work")


def disk_parts(spec: BoxSpec) -> tuple[int | None, int | None]:
    """Megabytes of the workdir, and of each of /tmp and /dev/shm; together all that can be written."""
    if spec.disk_mb is None:
        return None, None
    small = spec.disk_mb // SMALL_PART
    return spec.disk_mb - 2 * small, small


def environment_of(spec: BoxSpec) -> dict[str, str]:
    """Variables of all commands; a user without a home writes to its workdir."""
    return {"HOME": spec.workdir, "TMPDIR": "/tmp", **spec.env}
