"""The process that locks a program in and takes everything it started down with it; python_tool.py starts it.

    python -I -S python_sandbox.py '{"work": …, "memory_mb": …, "report_fd": …, …}' < program.py

This process stays as it is and waits. Its child enters namespaces (processes, network, mounts) where the kernel grants
them, with homes and sockets covered and every file system read-only but the work folder, which is a small one in
memory; leaves root where this one is root; sets resource limits; and becomes the program. On `report_fd` it says
"namespaces", "limits" or "cannot: …". Exit status: the program's, or 128 + signal. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount uts ipc pid net
_NEW_USERS = 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_SHARED = ("/tmp", "/var/tmp", "/run", "/dev/shm")
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1


def main() -> int:
    settings = json.loads(sys.argv[1])
    program = sys.stdin.read()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whatever loses its parent becomes a child of this process
    child = os.fork()
    if not child:
        _lock_in(program, settings)
    try:
        return _outlive(child)
    finally:
        _kill_children()


def _lock_in(program: str, settings: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        was_root = os.getuid() == 0
        namespaces = settings["namespaces"] and _enter_namespaces(settings, was_root)
        if was_root:
            _leave_root(Path(settings["work"]))
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.access(settings["interpreter"], os.X_OK):
            raise PermissionError(f"user {os.getuid()} may not run {settings['interpreter']}")
        others = 0 if namespaces or was_root else _threads_of(os.getuid())
        os.write(settings["report_fd"], b"namespaces" if namespaces else b"limits")
        if namespaces:
            _fork_first_process()
        _become(program, settings, others)
    except OSError as error:
        os.write(settings["report_fd"], f"cannot: {error}".encode())
        os._exit(1)


def _enter_namespaces(settings: dict[str, Any], as_root: bool) -> bool:
    """False where the kernel does not grant them; then nothing has changed."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_NEW_NAMESPACES if as_root else _NEW_NAMESPACES | _NEW_USERS):
        return False
    if not as_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    work = settings["work"]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _hide(settings["home"], settings["python"], work)
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    _checked(_LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only)))
    _mount("tmpfs", work, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={settings['files_mb']}m,mode=700,uid={user}")
    return True


def _hide(home: str, kept: list[str], work: str) -> None:
    """Cover what belongs to users: their homes, sockets (one is enough to get out), and what others may not enter.

    `kept`, the folders of this Python, and the work folder stay where they are.
    """
    handles = {folder: os.open(folder, os.O_PATH) for folder in kept}
    named = [home, *_SHARED, *map(_closed_above, kept)]
    places = {Path(place).resolve() for place in named if place and Path(place).is_dir()} - {Path("/")}
    outermost = [place for place in places if not any(other in place.parents for other in places)]
    for place in outermost:
        _mount("tmpfs", str(place), "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder, handle in handles.items():
        if any(Path(folder).is_relative_to(place) for place in outermost):
            Path(folder).mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", folder, None, _MS_BIND | _MS_REC)
        os.close(handle)
    Path(work).mkdir(parents=True, exist_ok=True)


def _closed_above(folder: str) -> str | None:
    """The first folder on the way to it that others may not enter: to a user that is not root it is not there."""
    way = [*reversed(Path(folder).parents), Path(folder)]
    return next((str(p) for p in way if not p.stat().st_mode & stat.S_IXOTH), None)


def _leave_root(work: Path) -> None:
    """Root has no limit on processes and may write anywhere: go on as a user that nothing else runs as."""
    user = 40_000 + os.getpid() % 20_000
    os.chown(work, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _fork_first_process() -> None:
    """Returns in the program's process. Its parent is the first of the namespace: with it everything in it ends."""
    guardian = os.getpid()
    first = os.fork()
    if first:
        os._exit(_outlive(first))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not Path(f"/proc/{guardian}").exists():
        os._exit(1)  # it was killed before this process could ask to be told
    child = os.fork()
    if child:
        _prctl(_PR_SET_DUMPABLE, 0)  # not to be debugged by the program
        os._exit(_outlive(child))


def _become(program: str, settings: dict[str, Any], others: int) -> NoReturn:
    os.chdir(settings["work"])
    megabyte = 1 << 20
    for kind, limit in (
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        (resource.RLIMIT_AS, settings["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, settings["files_mb"] * megabyte),
        (resource.RLIMIT_NPROC, settings["processes"] + others + 2),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)
    home = settings["work"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    os.set_inheritable(settings["report_fd"], False)
    os.execve(settings["interpreter"], [settings["interpreter"], "-I", "-B", "-c", program], environment)


def _outlive(child: int) -> int:
    """Wait for `child`, burying what it left behind; its exit status as a shell gives it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_children() -> None:
    """Until there are none: those of the killed become this process's own, whatever session they are in."""
    while children := [pid for pid, parent in _parents() if parent == os.getpid()]:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _parents() -> list[tuple[int, int]]:
    """(process, its parent) of every process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])))
    return found


def _threads_of(user: int) -> int:
    """Threads of all processes of a user: RLIMIT_NPROC counts them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):
            count += os.stat(folder).st_uid == user
    return count


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _checked(_LIBC.mount(*encoded, flags, options.encode()))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"the namespaces cannot be set up: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
