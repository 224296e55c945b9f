"""What keeps the commands of a sandbox off its first process, and what they must not leave behind in the kernel.

Commands run as the user of the first process, and Linux lets a user change limits, priority and processors of any
process of his, traceable or not. With ``prlimit`` on process 1 a command could end its own box, which is a failure of
infrastructure and tried again, where its result would have been a bad one; or slow down whoever leases the box next.
So a filter of system calls refuses that. It also takes away the kernel's keyrings, in which keys can be hidden from
whoever looks for what was left.

Part of the program inside a box (``sandbox_init``): nothing but the standard library, and as little of it as will do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource

JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
"""The number of ``keyctl``, whose operation 1 this is; libc has no function for it."""
SECCOMP = {"x86_64": 317, "aarch64": 277, "riscv64": 277}
SET_MODE_FILTER, FLAG_SPEC_ALLOW = 1, 4
"""The flag: old kernels would slow filtered processes down otherwise."""

_X86_64, _I386, _AARCH64, _RISCV64 = 0xC000003E, 0x40000003, 0xC00000B7, 0xC00000F3
INTERFACES = {"x86_64": (_X86_64, _I386), "aarch64": (_AARCH64,), "riscv64": (_RISCV64,)}
"""Machine -> its ways to call the kernel, as filters name them; calls in any other way do not exist in a sandbox."""
_KEYS = {_X86_64: (248, 249, 250), _I386: (286, 287, 288)}
"""``add_key``, ``request_key``, ``keyctl``."""
_OF_PROCESS = {_X86_64: (302, 142, 144, 314, 203), _I386: (340, 154, 156, 351, 241)}
"""``prlimit64``, ``sched_setparam``, ``sched_setscheduler``, ``sched_setattr``, ``sched_setaffinity``: whose, first."""
_OF_WHOM = {_X86_64: ((141, 2), (251, 3)), _I386: ((97, 2), (289, 3))}
"""``setpriority``, ``ioprio_set``, each with what means all processes of a user: of whom second."""
for _other in (_AARCH64, _RISCV64):
    _KEYS[_other] = (217, 218, 219)
    _OF_PROCESS[_other] = (261, 118, 119, 274, 122)
    _OF_WHOM[_other] = ((140, 2), (30, 3))
_X32_BIT = 0x40000000
"""Of numbers of calls: another interface under the name of x86_64."""

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _INTERFACE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; how many to leave out where it compares."""
    return code.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")


def _for_interface(interface: int) -> list[bytes]:
    """The rules for calls that come in one way; they never go on to what follows."""
    refuse, allow = _step(_RETURN, _REFUSE | errno.EPERM), _step(_RETURN, _ALLOW)
    missing = _step(_RETURN, _REFUSE | errno.ENOSYS)
    first, second = _step(_LOAD, _ARGUMENTS_AT), _step(_LOAD, _ARGUMENTS_AT + 8)
    steps = [_step(_LOAD, _NUMBER_AT), _step(_IF_AT_LEAST, _X32_BIT, 0, 1), missing]
    for number in _KEYS[interface]:
        steps += [_step(_IF_EQUAL, number, 0, 1), missing]
    for number in _OF_PROCESS[interface]:
        steps += [_step(_IF_EQUAL, number, 0, 4), first, _step(_IF_EQUAL, 1, 0, 1), refuse, allow]
    for number, of_user in _OF_WHOM[interface]:
        whom = [first, _step(_IF_EQUAL, of_user, 2, 0), second, _step(_IF_EQUAL, 1, 0, 1), refuse, allow]
        steps += [_step(_IF_EQUAL, number, 0, len(whom)), *whom]
    return [*steps, allow]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


class Filter:
    """Of the calls of commands; none on a machine whose calls are not known here."""

    def __init__(self, machine: str) -> None:
        self._seccomp = SECCOMP.get(machine)
        steps: list[bytes] = []
        for interface in INTERFACES.get(machine, ()):
            rules = _for_interface(interface)
            steps += [_step(_LOAD, _INTERFACE_AT), _step(_IF_EQUAL, interface, 0, len(rules)), *rules]
        steps.append(_step(_RETURN, _REFUSE | errno.ENOSYS))
        self._memory = ctypes.create_string_buffer(b"".join(steps))
        self._program = _Program(len(steps), ctypes.addressof(self._memory))

    def hold(self, libc: ctypes.CDLL) -> None:
        """From here on, and for all that this process starts.  Raises OSError where the kernel has no filters."""
        if self._seccomp is not None and libc.syscall(
            self._seccomp, SET_MODE_FILTER, FLAG_SPEC_ALLOW, ctypes.byref(self._program)
        ):
            raise OSError(errno.ENOSYS, "the kernel takes no filter of system calls (seccomp)")


def join_own_keyring(libc: ctypes.CDLL) -> None:
    """The owner's keys are none of the box's."""
    number = JOIN_SESSION_KEYRING.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, 1, 0, 0, 0, 0)


def go_first() -> None:
    """When the machine's memory runs out, let the kernel end boxes, and not the training beside them."""
    try:
        with open("/proc/self/oom_score_adj", "wb") as file:
            file.write(b"1000")
    except OSError:  # a wish, and no limit of the box
        pass


def take_limit(name: int, value: int) -> None:
    """The tighter one of this and what the owner itself may not go beyond."""
    _, hard = resource.getrlimit(name)
    soft, most = value, value + 1 if name == resource.RLIMIT_CPU else value  # a moment between asking and ending
    if hard != resource.RLIM_INFINITY:
        soft, most = min(soft, hard), min(most, hard)
    resource.setrlimit(name, (soft, most))


def check_kernel_objects() -> None:
    """Raises OSError for what outlives processes and files: a box that left such is not used again."""
    for kind in ("shm", "sem", "msg"):
        path = f"/proc/sysvipc/{kind}"
        if os.path.exists(path):
            with open(path, "rb") as file:
                if len(file.readlines()) > 1:
                    raise OSError(errno.EBUSY, f"System V {kind} objects were left behind")
    if os.path.isdir("/dev/mqueue"):
        os.chmod("/dev/mqueue", 0o1777)
        if os.listdir("/dev/mqueue"):
            raise OSError(errno.EBUSY, "message queues were left behind")
    if os.path.exists("/proc/keys"):
        with open("/proc/keys", "rb") as file:
            keys = [line.split() for line in file]
            if any(key[7] != b"keyring" or key[8][:1] not in b"_." for key in keys):
                raise OSError(errno.EBUSY, "keys were left in the kernel's keyring")
