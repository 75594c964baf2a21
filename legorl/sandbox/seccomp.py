"""System calls that no command of a sandbox may make: those that reach beyond its namespaces.

Key rings are not confined by a namespace, and a command would inherit its host's; the others are the parts
of the kernel where unprivileged code has most often found a way out. They fail with ENOSYS, so that programs
fall back. Where no user namespace of its own stops a command from making namespaces, the filter does.
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
_NAMESPACES = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone3": (
        435,
        435,
    ),  # its flags lie in memory, where a filter cannot look; the C library then uses clone
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
}
_CLONE = (56, 220)
_NAMESPACE_FLAGS = linux.ALL_NAMESPACES
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column above, AUDIT_ARCH value."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.ENOSYS
_X32 = 0x40000000


def supported() -> bool:
    """This machine's system calls are known here."""
    return platform.machine() in _MACHINES


def deny_system_calls(*, namespaces: bool = False) -> None:
    """From now on, for this process and its descendants; needs `linux.drop_privileges` first.

    Args:
        namespaces: deny making and entering namespaces, and mounting, too.

    Raises:
        OSError: the kernel has no seccomp filters.
        KeyError: not `supported`.
    """
    column, architecture = _MACHINES[platform.machine()]
    denied = {**_DENIED, **_NAMESPACES} if namespaces else _DENIED
    tests = [(_EQUAL, call[column]) for call in denied.values()] + [(_AT_LEAST, _X32)]
    # (instruction, jump if true, jump if false, value); a jump counts the instructions it passes over.
    program = [(_LOAD, 0, 0, _NUMBER)]
    program += [(test, len(tests) - index, 0, value) for index, (test, value) in enumerate(tests)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY)]
    if namespaces:
        flags = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NAMESPACE_FLAGS), (_RETURN, 0, 0, _DENY)]
        program = [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, len(flags), _CLONE[column]), *flags, *program]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 0, len(program) - 1, architecture), *program]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    linux.set_seccomp_filter(struct.pack("@HP", len(program), ctypes.addressof(code)))
