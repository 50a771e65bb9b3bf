"""Start a program that can reach only what it needs: its files, its own processes, no privileges.

A holder of the cluster's token can run code in the processes of a Ray node. So each node, and the process through
which the control plane talks to Ray, starts as ``python -m share_compute_actors.machine.confine POLICY COMMAND...``:

1. Another user, where a privileged process starts it (`Policy.user`), else the same user without capabilities.
2. Landlock (Linux 5.13 or newer): only the files and folders that the policy lists; no tracing of and, since
   Linux 6.12, no signals to processes outside.
3. ``no_new_privs``: programs with the setuid bit give nothing back.

Where the kernel has no Landlock, `landlock_version` returns 0, and the other two still hold. Sources: the kernel's
``Documentation/userspace-api/landlock.rst`` and ``no_new_privs.rst``; ``capabilities(7)``.

This module needs the standard library only, because it runs before everything else.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import stat
import struct
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS, _CAPBSET_DROP = 1, 38, 24
_SIGKILL = 9
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION = 0x20080522
_READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute a file, read a file, list a folder."""
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that exist for a file: execute, write, read, truncate, device ioctl."""
_RIGHTS_BY_VERSION = ((5, 1 << 15), (3, 1 << 14), (2, 1 << 13))
_FIRST_RIGHTS = (1 << 13) - 1
_SCOPES = 1 << 0 | 1 << 1
"""Abstract Unix sockets and signals (version 6)."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "dri", "kfd")
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/nix",
    "/proc",
    "/sys",
    "/run/systemd/resolve",
)
_CONFIGURATION = (
    *(
        "alternatives",
        "ca-certificates",
        "gai.conf",
        "group",
        "host.conf",
        "hosts",
        "ld.so.cache",
        "ld.so.conf",
    ),
    *(
        "ld.so.conf.d",
        "localtime",
        "mime.types",
        "nsswitch.conf",
        "nvidia",
        "os-release",
        "passwd",
        "pki/tls/certs",
    ),
    *("protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "timezone"),
)
"""Below ``/etc``: what programs need and everybody may know."""
_KEPT_VARIABLES = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"}
)
_KEPT_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "PYTHON", "SSL_")


@dataclass(frozen=True, slots=True)
class User:
    """A user of this machine."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Files and rights of a confined program, beside the system's programs and this Python installation."""

    read: tuple[str, ...] = ()
    """Files and folders that it may read."""
    write: tuple[str, ...] = ()
    """Files and folders that it may also change; they exist."""
    home: str = "/nonexistent"
    """Its ``HOME``."""
    user: User | None = None
    """The user that it runs as; None: the caller, without capabilities."""


def confined(command: Sequence[str], policy: Policy) -> list[str]:
    """Return the command that runs ``command`` under a policy; the same command on systems other than Linux."""
    if sys.platform != "linux":
        return list(command)
    # -P: the folder that we happen to be in is no place of packages.
    return [sys.executable, "-P", "-m", __name__, json.dumps(asdict(policy)), *command]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a confined program inherits: none that could hold a key, a password or a URL."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
    }


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def installation() -> tuple[str, ...]:
    """Return the folders of this Python, its packages and this project, without those that the system has anyway."""
    known = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path}
    present = [folder for folder in known if folder and Path(folder).exists()]
    return tuple(sorted({*present, *map(os.path.realpath, present)} - {"/"}))


def unprivileged_user(name: str | None, paths: Iterable[str]) -> tuple[User | None, str]:
    """Return the user that confined programs run as when this process is root's, or why there is none.

    Args:
        name: of the user; default: ``share-compute`` where there is one, else ``nobody``.
        paths: what it must be able to read, beside this installation.
    """
    if os.geteuid() != 0:
        return None, ""
    for known in [name] if name else ["share-compute", "nobody"]:
        try:
            entry = pwd.getpwnam(known)
        except KeyError:
            continue
        user = User(entry.pw_name, entry.pw_uid, entry.pw_gid)
        closed = next((path for path in (*installation(), *paths) if not can_reach(user, path)), None)
        return (user, "") if closed is None else (None, f"user {user.name} cannot read {closed}")
    return None, f"there is no user {name or 'nobody'}"


def can_reach(user: User, path: str) -> bool:
    """Whether a user can enter all folders above ``path`` and read it."""
    place = Path(os.path.realpath(path))
    above = all(_allows(user, folder, stat.S_IXOTH) for folder in place.parents)
    return above and _allows(user, place, stat.S_IROTH)


def _allows(user: User, path: Path, others: int) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_uid == user.uid:
        return bool(found.st_mode & others << 6)
    if found.st_gid == user.gid:
        return bool(found.st_mode & others << 3)
    return bool(found.st_mode & others)


# -- in the process that becomes the confined one -------------------------------------------------------------------


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _become(user: User | None, parent: int) -> None:
    """Give up all privileges, for good."""
    if os.geteuid() == 0:
        for capability in range(_LAST_CAPABILITY + 1):
            if _libc().prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
                break  # the kernel knows no more of them
        if user is not None:
            os.setgroups([])
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        _check(_libc().capset(header, bytes(24)), "capset")
    _prctl(_SET_NO_NEW_PRIVS, 1)
    # Another user's process is not tied to its parent any more.
    _prctl(_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _restrict(read: Iterable[str], write: Iterable[str]) -> None:
    """Enter a Landlock domain in which only these files and folders exist."""
    version = landlock_version()
    if not version:
        return
    rights = _FIRST_RIGHTS
    for since, right in _RIGHTS_BY_VERSION:
        rights |= right if version >= since else 0
    attributes = struct.pack("=QQQ", rights, 0, _SCOPES) if version >= 6 else struct.pack("=Q", rights)
    libc = _libc()
    rules = _check(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for path in read:
            _allow(rules, path, rights & _READ)
        for path in write:
            _allow(rules, path, rights)
        _check(libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is not there, or not ours to enter
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        attribute = struct.pack("=Qi", rights, place)
        _check(_libc().syscall(_ADD_RULE, rules, _PATH_BENEATH, attribute, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _devices() -> list[str]:
    graphics = [str(path) for path in Path("/dev").glob("nvidia*")]
    return [*(f"/dev/{name}" for name in _DEVICES), *graphics]


def main(arguments: Sequence[str]) -> None:
    """Confine this process, then become the program: ``POLICY PROGRAM ARGUMENT...``."""
    fields = json.loads(arguments[0])
    user = User(**fields.pop("user")) if fields["user"] else fields.pop("user")
    policy = Policy(read=tuple(fields["read"]), write=tuple(fields["write"]), home=fields["home"], user=user)
    os.umask(0o077)
    environment = {**os.environ, "HOME": policy.home}
    if user is not None:
        environment |= {"USER": user.name, "LOGNAME": user.name}
    # Rules need only open folders, and those are opened best with the rights that we still have.
    parent = os.getppid()
    _become(user, parent)
    system = (*_SYSTEM, *(f"/etc/{name}" for name in _CONFIGURATION))
    _restrict((*system, *installation(), *policy.read), (*_devices(), *policy.write))
    os.execvpe(arguments[1], list(arguments[1:]), environment)  # noqa: S606 - it is what we were started for


if __name__ == "__main__":
    main(sys.argv[1:])
