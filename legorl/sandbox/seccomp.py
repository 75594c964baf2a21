"""System calls that no command of a sandbox may make: those that reach beyond its namespaces.

Key rings are not confined by a namespace, and a command would inherit its host's; the others are the parts
of the kernel where unprivileged code has most often found a way out. They fail with ENOSYS, so that programs
fall back.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from legorl.sandbox import linux

_DENIED = {
    # name: (x86_64, aarch64)
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column above, AUDIT_ARCH value."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.ENOSYS
_X32 = 0x40000000


def supported() -> bool:
    """This machine's system calls are known here."""
    return platform.machine() in _MACHINES


def deny_system_calls() -> None:
    """From now on, for this process and its descendants; needs `linux.drop_privileges` first.

    Raises:
        OSError: the kernel has no seccomp filters.
        KeyError: not `supported`.
    """
    column, architecture = _MACHINES[platform.machine()]
    numbers = sorted(call[column] for call in _DENIED.values())
    # The denial is the last instruction; jumps count the instructions they pass over.
    tests = [(_EQUAL, number) for number in numbers] + [(_AT_LEAST, _X32)]
    program = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 0, len(tests) + 2, architecture),
        (_LOAD, 0, 0, 0),  # system call
        *((test, len(tests) - index, 0, value) for index, (test, value) in enumerate(tests)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    linux.set_seccomp_filter(struct.pack("@HP", len(program), ctypes.addressof(code)))
