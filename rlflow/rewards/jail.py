"""The first program of a jail: gives up what it must not have, then becomes another program.

Started as `python -I -S jail.py CONFIG REPORT COMMAND...`, alone and by path: it imports nothing
of rlflow. CONFIG is a JSON file, removed once it is read. With `namespaces` the program sees no
network, no process but its own, and a file system in memory that holds the listed folders,
read-only, and `/sandbox`, where it runs; all its processes die with it. Linux only. The exit
code is that of the program; 120 says that the jail itself failed, with the reason on descriptor
REPORT, which the program does not get.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
INSIDE = 1000
NOBODY = 65534
FAILED = 120
HERE = "/tmp"  # noqa: S108  anybody may look into it, and in here it hides nothing but itself
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Build the jail and run the command in it."""
    path, report, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(report, False)
    try:
        with open(path) as file:  # noqa: PTH123  pathlib costs its import
            config = json.load(file)
        os.unlink(path)  # noqa: PTH108  as above
        _die_with_parent()
        if config["namespaces"]:
            _enter_namespaces()
            _continue_in_child()
            _change_root(config)
            _continue_in_child()
            os.setsid()
        else:
            os.chdir(config["directory"])
            _write("main.py", config["program"])
        for name, most in config["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        os.execve(command[0], command, config["environment"])  # noqa: S606  what the jail is for
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(FAILED)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  as above
        file.write(text)


def _die_with_parent() -> None:
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _continue_in_child() -> None:
    """Fork; the parent ends as the child does."""
    if child := os.fork():
        os._exit(_waited(child))
    _die_with_parent()


def _waited(child: int) -> int:
    """Wait for a child, and for orphans that come to the first process; the child's exit code."""
    while True:
        found, status = os.wait()
        if found == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _enter_namespaces() -> None:
    """New namespaces of every kind; root becomes nobody, another user stays who it is."""
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        _check(libc.unshare(NAMESPACES), "unshare")
        _write("/proc/self/setgroups", "deny")
        _map("self", user, group)
        return
    # Limits on processes do not hold for root, who alone may map another user, from outside.
    os.setgroups([])
    (unshared, tell_unshared), (mapped, tell_mapped) = os.pipe(), os.pipe()
    if child := os.fork():
        os.close(tell_unshared)
        if os.read(unshared, 1):
            _map(str(child), NOBODY, NOBODY)
            os.write(tell_mapped, b".")
        os._exit(_waited(child))
    _die_with_parent()
    os.close(tell_mapped)
    _check(libc.unshare(NAMESPACES), "unshare")
    os.write(tell_unshared, b".")
    if not os.read(mapped, 1):
        raise OSError("the user could not be mapped")


def _map(process: str, user: int, group: int) -> None:
    _write(f"/proc/{process}/uid_map", f"{INSIDE} {user} 1")
    _write(f"/proc/{process}/gid_map", f"{INSIDE} {group} 1")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    done = libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode()
    )
    _check(done, f"mount {target}")


def _change_root(config: dict[str, Any]) -> None:
    """A root in memory with the visible folders bound read-only, and nothing of the old one.

    What lies outside is opened first, by the user of outside, and mounted by the one of inside.
    """
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    paths = [path for path in (*config["visible"], *DEVICES) if not os.path.islink(path)]  # noqa: PTH114
    links = {path: os.readlink(path) for path in config["visible"] if path not in paths}  # noqa: PTH115
    opened = {path: os.open(path, os.O_PATH) for path in paths}
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    flags = MS_NOSUID | MS_NODEV
    _mount("jail", HERE, "tmpfs", flags, f"size={config['disk']},mode=755")
    for path in paths:
        _show(opened[path], HERE + path, writable=path in DEVICES)
    for path, target in links.items():
        os.makedirs(os.path.dirname(HERE + path), exist_ok=True)  # noqa: PTH103, PTH120  as above
        os.symlink(target, HERE + path)  # noqa: PTH211  as above
    for name in ("proc", "sandbox", "tmp", "old"):
        os.makedirs(f"{HERE}/{name}", exist_ok=True)  # noqa: PTH103  as above
    _mount("proc", f"{HERE}/proc", "proc", flags)
    _write(f"{HERE}/sandbox/main.py", config["program"])
    os.chdir(HERE)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    _check(libc.syscall(number, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")  # noqa: PTH106  as above
    os.chdir("/sandbox")
    for descriptor in opened.values():
        os.close(descriptor)


def _name(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _show(source: int, target: str, *, writable: bool) -> None:
    """Bind what is open to a path of the new root."""
    if os.path.isdir(_name(source)):  # noqa: PTH112  as above
        os.makedirs(target, exist_ok=True)  # noqa: PTH103  as above
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120  as above
        os.close(os.open(target, os.O_CREAT))
    _mount(_name(source), target, None, MS_BIND)
    if not writable:
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID
        _mount("none", target, None, flags | _locked(source))


def _locked(source: int) -> int:
    """Flags of the mount that a file lies on, which a namespace may not take away."""
    flags = os.fstatvfs(source).f_flag
    kept = {os.ST_NODEV: MS_NODEV, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_RELATIME: 1 << 21}
    return sum(mount for stat, mount in kept.items() if flags & stat)


if __name__ == "__main__":
    main()
