"""The filter of system calls, run step by step for each machine, and limits below those of the owner."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.resources.backends import sandbox_guard
from wingbeat.resources.backends.sandbox_guard import INTERFACES, Filter

ALLOWED, NO_SUCH_CALL, REFUSED = 0x7FFF0000, 0x00050000 | errno.ENOSYS, 0x00050000 | errno.EPERM
X86_64, I386, GENERIC = 0xC000003E, 0x40000003, 0xC00000B7

# From the kernel's tables of calls: read, prlimit64, sched_setaffinity, setpriority, ioprio_set, keyctl.
CALLS = {
    ("x86_64", X86_64): (0, 302, 203, 141, 251, 250),
    ("x86_64", I386): (3, 340, 241, 97, 289, 288),
    ("aarch64", GENERIC): (63, 261, 122, 140, 30, 219),
    ("riscv64", 0xC00000F3): (63, 261, 122, 140, 30, 219),
}


def verdict(held: Filter, interface: int, number: int, *arguments: int) -> int:
    """What the kernel would do with a call."""
    steps: ctypes.Array[ctypes.c_char] = held._memory  # pyright: ignore[reportPrivateUsage]
    data = number.to_bytes(4, "little") + interface.to_bytes(4, "little") + bytes(8)
    data += b"".join((argument % 2**64).to_bytes(8, "little") for argument in (*arguments, *[0] * 6)[:6])
    at, held_value = 0, 0
    while True:
        step = steps.raw[at : at + 8]
        code, value = int.from_bytes(step[:2], "little"), int.from_bytes(step[4:], "little")
        at += 8
        if code == 0x06:
            return value
        if code == 0x20:
            held_value = int.from_bytes(data[value : value + 4], "little")
        else:
            is_so = {0x15: held_value == value, 0x35: held_value >= value}[code]
            at += 8 * (step[2] if is_so else step[3])


@pytest.mark.parametrize(("machine", "interface"), CALLS)
def test_what_would_change_the_first_process_is_refused(machine: str, interface: int) -> None:
    held = Filter(machine)
    read, prlimit, affinity, priority, io_priority, keys = CALLS[machine, interface]
    assert verdict(held, interface, read, 1) == ALLOWED
    assert verdict(held, interface, keys, 1) == NO_SUCH_CALL
    for number in (prlimit, affinity):
        assert verdict(held, interface, number, 1) == REFUSED
        assert verdict(held, interface, number, 2**32 + 1) == REFUSED, "the kernel looks at the lower half"
        assert verdict(held, interface, number, 0) == verdict(held, interface, number, 7, 1) == ALLOWED
    for number, of_user in ((priority, 2), (io_priority, 3)):
        assert verdict(held, interface, number, of_user, 0) == REFUSED
        assert verdict(held, interface, number, 1, 1) == REFUSED
        assert verdict(held, interface, number, 1, 0) == verdict(held, interface, number, 1, 8) == ALLOWED


def test_other_ways_into_the_kernel_are_closed() -> None:
    assert verdict(Filter("x86_64"), GENERIC, 63) == NO_SUCH_CALL
    assert verdict(Filter("aarch64"), 0x40000028, 3) == NO_SUCH_CALL
    assert verdict(Filter("x86_64"), X86_64, 0x40000000 | 302, 1) == NO_SUCH_CALL
    assert {machine for machine, _ in CALLS} == set(INTERFACES)


def test_a_limit_above_what_the_owner_may_have_is_the_owners() -> None:
    """It was an exit code of 125 for each command under a hard limit of core dumps, which many machines have."""
    code = f"""
import sys; sys.path.append({str(Path(sandbox_guard.__file__).parent)!r})
import resource, sandbox_guard
resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); sandbox_guard.take_limit(resource.RLIMIT_CORE, 1)
resource.setrlimit(resource.RLIMIT_CPU, (7, 7)); sandbox_guard.take_limit(resource.RLIMIT_CPU, 7)
resource.setrlimit(resource.RLIMIT_FSIZE, (90, 90)); sandbox_guard.take_limit(resource.RLIMIT_FSIZE, 30)
print(*(resource.getrlimit(name) for name in (resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "(0, 0) (7, 7) (30, 30)\n", done.stderr
