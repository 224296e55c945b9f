"""What a sandbox sees: the arguments of ``bwrap`` that make it, from nothing.

``/usr``, a few harmless files of ``/etc``, its own ``/proc`` and ``/dev``, the spec's mounts, and two places that it
can write, the working folder and ``/tmp``, both in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from wingbeat.resources.backends.limits import MIB
from wingbeat.resources.specs import SandboxSpec

DEFAULT_DISK_MB = 1024
"""Where a spec says nothing: enough for a compiler, not enough to take a machine down."""
SHM_MB = 64

USER = 1000
"""Inside."""
INSIDE = "/run/wingbeat"
"""Where a sandbox has the program of its first process."""
TMP = "/tmp"
SHM = "/dev/shm"

ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "ssl/certs")
ETC_NETWORK = ("resolv.conf", "services", "protocols", "ssl/openssl.cnf", "ca-certificates", "pki/tls/certs")
"""Of the host's ``/etc``, where they are there: nothing in them is secret."""
FILES = {
    "/etc/passwd": f"agent:x:{USER}:{USER}:agent:{TMP}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": f"agent:x:{USER}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def root_of(
    spec: SandboxSpec, texts: Mapping[str, int], *, flags: Sequence[str], binds: Sequence[str]
) -> Iterator[str]:
    """The arguments of ``bwrap`` that build its root; the order is that of the mounts.

    ``texts``: path -> descriptor of what is written there; ``flags`` and ``binds`` are those of this machine.
    """
    yield from isolation(flags, network=spec.network)
    yield from system(binds)
    for path in ("/etc", "/etc/ssl", "/run", INSIDE, "/var"):
        yield from ("--perms", "0755", "--dir", path)
    for name in (*ETC, *(ETC_NETWORK if spec.network else ())):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    for path, fd in texts.items():
        yield from ("--perms", "0444", "--ro-bind-data", str(fd), path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--mqueue", "/dev/mqueue")
    disk = spec.disk_mb or min(DEFAULT_DISK_MB, (spec.memory_mb or 2 * DEFAULT_DISK_MB) // 2 or 1)
    for path, size_mb, mode in ((TMP, disk, "1777"), (SHM, min(SHM_MB, disk), "1777"), (spec.workdir, disk, "0755")):
        yield from ("--perms", mode, "--size", str(size_mb * MIB), "--tmpfs", path)
    yield from ("--symlink", "/tmp", "/var/tmp")
    for mount in spec.mounts:
        yield from ("--ro-bind" if mount.read_only else "--bind", mount.source, mount.target)
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", spec.workdir)


def isolation(flags: Sequence[str], *, network: bool) -> Iterator[str]:
    """Namespaces, user and rights."""
    yield from ("--unshare-all", "--unshare-user", *flags)
    if network:
        yield "--share-net"
    yield from ("--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv")
    yield from ("--new-session", "--as-pid-1")


def system(binds: Sequence[str]) -> Iterator[str]:
    """The machine's programs, read-only."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for path in binds:
        yield from ("--ro-bind", path, path)
