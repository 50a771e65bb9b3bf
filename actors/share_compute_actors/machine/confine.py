"""Start a program in confinement: without privileges, and with access only to listed files and its own processes.

A holder of the cluster's token can run code in the processes of a Ray node. So each node, and the process through
which the control plane talks to Ray, starts as ``python -m share_compute_actors.machine.confine POLICY COMMAND...``.
Three measures confine the program:

1. The program runs as an unprivileged user (`Policy.user`) or, without one, as this process's user. In both cases the
   program has no capabilities: it loses root's capabilities and this process's ambient capabilities.
2. Landlock (Linux 5.13 or newer) denies access to all files except those of the system, of this Python installation
   and of the policy. The program cannot trace processes outside its Landlock domain and, since Linux 6.12, cannot
   signal them.
3. ``no_new_privs`` keeps the program from regaining privileges by starting a program with the setuid bit.

If the kernel has no Landlock, `landlock_version` returns 0, and the other two measures still hold. Sources: the
kernel's ``Documentation/userspace-api/landlock.rst`` and ``no_new_privs.rst``; ``capabilities(7)``.

The process that runs this module forks the program and becomes its guard. The guard keeps its user and its access to
files. It passes SIGTERM on, and exits with the program's status. Before the guard exits, it kills all descendants of
the program, including detached ones (`_guard`). The guard exits when the program ends, when the guard receives
`END_NOW`, and when the process that started the guard ends.

This module imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import signal
import stat
import struct
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
END_NOW = signal.SIGUSR1
"""Signal that ends a guard and all descendants of its program at once.

SIGKILL would end the guard, and leave the descendants running."""
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION = 0x20080522
_READ = 1 << 0 | 1 << 2 | 1 << 3
"""Rights to execute a file, read a file, and list a folder."""
_OVERWRITE = 1 << 1 | 1 << 14
"""Rights to open an existing file for writing, and to truncate it when it is opened."""
_RESOLVE_UNIX = 1 << 16
"""Right to connect to Unix socket files of processes outside the Landlock domain (ABI 9, Linux 7.1)."""
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15 | _RESOLVE_UNIX
"""Rights that exist for a file: execute, write, read, truncate, device ioctl, Unix socket."""
_REFER = 1 << 13
"""Right to link and rename files across folders (ABI 2). Domains that restrict files deny both rights by default."""
_RIGHTS_BY_VERSION = ((9, _RESOLVE_UNIX), (5, 1 << 15), (3, 1 << 14), (2, _REFER))
_FIRST_RIGHTS = (1 << 13) - 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1
_SCOPES_SINCE = 6
_DEVICES = ("null", "zero", "full", "random", "urandom", "shm", "dri", "kfd")
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt/cuda",
    "/opt/rocm",
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
"""Files below ``/etc`` that programs need; they contain no secrets."""
_KEPT_VARIABLES = frozenset(
    {"CXX", "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"}
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
    """Files that a confined program may use, besides those of the system and Python, and the user that it runs as.

    Paths that do not exist when the program starts are ignored.
    """

    read: tuple[str, ...] = ()
    """Files and folders that the program may read."""
    write: tuple[str, ...] = ()
    """Files and folders that the program may read and change."""
    home: str = "/nonexistent"
    """Value of the program's variable ``HOME``."""
    user: User | None = None
    """The user that the program runs as. None: the caller's user, without root's capabilities if that user is root."""
    names_threads: bool = False
    """Whether the program may write to existing files below ``/proc``. CUDA's driver names its threads there
    (``/proc/PID/task/TID/comm``), and fails with error 304 if it cannot. Landlock cannot allow these files alone. A
    user can change only own processes there; root could change settings of the kernel, so root never gets this right.
    """


def confined(command: Sequence[str], policy: Policy) -> list[str]:
    """Return the command that runs ``command`` under a policy; ``command`` itself on systems other than Linux."""
    if sys.platform != "linux":
        return list(command)
    # -P keeps Python from importing modules from the current working directory.
    return [sys.executable, "-P", "-m", __name__, json.dumps(asdict(policy)), *command]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that confined programs may inherit: those on an allow list, which names no secrets."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
    }


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def installation() -> tuple[str, ...]:
    """Return the folders of this Python, its packages and this project."""
    known = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path}
    present = [folder for folder in known if folder and Path(folder).exists()]
    return tuple(sorted({*present, *map(os.path.realpath, present)} - {"/"}))


def unprivileged_user(name: str | None, paths: Iterable[str]) -> tuple[User | None, str]:
    """Return the user that confined programs run as; if no user is suitable, return None and the reason.

    If this process is not root, return None and an empty reason: programs then run as the current user.

    Args:
        name: name of the user. Default: ``share-compute`` if that user exists, else ``nobody``.
        paths: files and folders that the user must be able to read, in addition to this installation.
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
    """Return whether a user can enter all folders above ``path`` and read ``path``."""
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


# -- in the process that becomes the confined program ---------------------------------------------------------------


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
    """Give up all privileges permanently, and let the kernel kill this process when its parent ends."""
    if os.geteuid() == 0:
        for capability in range(_LAST_CAPABILITY + 1):
            if _libc().prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
                break  # the kernel has no further capabilities
        if user is not None:
            os.setgroups([])
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
    # A program inherits ambient capabilities even if its user is not root.
    _prctl(_CAP_AMBIENT, _CLEAR_ALL)
    # The effective, permitted and inheritable sets become empty.
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_libc().capset(header, bytes(24)), "capset")
    # A change of user clears the parent-death signal, so the signal is set afterwards.
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class LandlockDomain:
    """Rights that a Landlock domain denies and grants."""

    rights: int
    """Rights to files that the domain denies by default."""
    scopes: int
    """Kinds of access, such as signals, to processes outside the domain; the domain denies them."""
    allowed: tuple[tuple[str, int], ...]
    """Paths, each with the rights that the domain grants there and below."""


def _restrict(read: Iterable[str], write: Iterable[str], overwrite: Iterable[str] = ()) -> None:
    """Enter the domain that `landlock_domain` returns; do nothing if the kernel has no Landlock."""
    if version := landlock_version():
        _enter_domain(landlock_domain(version, read, write, overwrite))


def landlock_domain(
    version: int, read: Iterable[str], write: Iterable[str], overwrite: Iterable[str] = ()
) -> LandlockDomain:
    """Return a Landlock domain that allows access only to these files and folders.

    Args:
        version: version of the kernel's Landlock interface; at least 1.
        read: files and folders to read.
        write: files and folders to read and change.
        overwrite: folders in which existing files may be written; this alone does not allow to read them.
    """
    rights = _FIRST_RIGHTS
    for since, right in _RIGHTS_BY_VERSION:
        rights |= right if version >= since else 0
    allowed = [*((path, rights & _READ) for path in read), *((path, rights) for path in write)]
    allowed += [(path, rights & _OVERWRITE) for path in overwrite]
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= _SCOPES_SINCE else 0
    return LandlockDomain(rights, scopes, tuple(allowed))


def _enter_domain(domain: LandlockDomain) -> None:
    """Enter a Landlock domain; it lasts until the process ends, and includes child processes."""
    rights, scopes = domain.rights, domain.scopes
    attributes = struct.pack("=QQQ", rights, 0, scopes) if scopes else struct.pack("=Q", rights)
    libc = _libc()
    rules = _check(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for path, granted in domain.allowed:
            _allow(rules, path, granted)
        _check(libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # the path does not exist, or a folder above it denies access to this user
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        attribute = struct.pack("=Qi", rights, place)
        _check(_libc().syscall(_ADD_RULE, rules, _PATH_BENEATH, attribute, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _libraries() -> list[str]:
    """Return the absolute paths in ``LD_LIBRARY_PATH``, except the root folder."""
    named = map(Path, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    return [str(path) for path in named if path.is_absolute() and path.resolve() != Path("/")]


def _devices() -> list[str]:
    graphics = [str(path) for path in Path("/dev").glob("nvidia*")]
    return [*(f"/dev/{name}" for name in _DEVICES), *graphics]


def _overwritten(policy: Policy) -> tuple[str, ...]:
    """Return the folders in which existing files may be written; see `Policy.names_threads`."""
    return ("/proc",) if policy.names_threads and os.geteuid() != 0 else ()


def _keep_signals() -> bool:
    """Enter a Landlock domain that blocks signals to processes outside it; return whether the kernel enforces it."""
    if landlock_version() < _SCOPES_SINCE:
        return False
    _enter_domain(LandlockDomain(_REFER, _SCOPE_SIGNALS, (("/", _REFER),)))
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    return False


def _kill_descendants(is_kept: bool) -> None:
    if is_kept:
        # Pid -1 means all processes that may be signalled. Landlock limits them to the domain of this process.
        # Processes that are being forked cannot escape (kernel/fork.c, copy_process).
        with suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        return
    # Orphans become children of this process, which is a subreaper, so repeated calls of this function reach
    # all descendants.
    # Only this process reaps its children, so their pids cannot have been reused.
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def _guard(program: int, is_kept: bool) -> int:
    """Forward SIGTERM to the program, and forward `END_NOW` as SIGKILL.

    Return the program's wait status after the program and all its descendants have ended.
    """
    status: int | None = None
    while True:
        received = signal.sigwait({signal.SIGTERM, signal.SIGCHLD, END_NOW})
        if status is None and received != signal.SIGCHLD:
            os.kill(program, signal.SIGTERM if received == signal.SIGTERM else signal.SIGKILL)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    status = ended[1]
        except ChildProcessError:
            assert status is not None
            return status
        if status is not None:
            _kill_descendants(is_kept)


def _end_like(status: int) -> None:
    """End this process in the same way as the program: with the same exit status, or by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # the kernel refuses a handler for SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def main(arguments: Sequence[str]) -> None:
    """Start a program in confinement, and guard it until it ends; the arguments are ``POLICY PROGRAM ARGUMENT...``."""
    fields = json.loads(arguments[0])
    user = User(**fields.pop("user")) if fields["user"] else fields.pop("user")
    fields |= {name: tuple(fields[name]) for name in ("read", "write")}
    policy = Policy(user=user, **fields)
    guard, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # `processes.tied` chose SIGKILL. The guard needs END_NOW instead, because it must kill descendants when its parent
    # ends.
    _prctl(_SET_PDEATHSIG, END_NOW)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    is_kept = _keep_signals()
    program = os.fork()
    if program:
        # This keeps processes of the same user from tracing the guard. It also prevents core dumps.
        _prctl(_SET_DUMPABLE, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        _end_like(_guard(program, is_kept))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.umask(0o077)
    environment = {**os.environ, "HOME": policy.home}
    if user is not None:
        environment |= {"USER": user.name, "LOGNAME": user.name}
    # Landlock's rules are added after the change of user, so paths that this user cannot open are left out.
    _become(user, guard)
    system = (*_SYSTEM, *(f"/etc/{name}" for name in _CONFIGURATION))
    _restrict(
        (*system, *_libraries(), *installation(), *policy.read),
        (*_devices(), *policy.write),
        _overwritten(policy),
    )
    os.execvpe(arguments[1], list(arguments[1:]), environment)  # noqa: S606 - the command comes from the caller


if __name__ == "__main__":
    main(sys.argv[1:])
