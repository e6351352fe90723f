"""The first program of a jail: gives up what it must not have, then runs another program.

Started as `python -I -S jail.py CONFIG REPORT COMMAND...`, alone and by path: it imports nothing
of rlflow. CONFIG is a descriptor to read JSON from. With `namespaces` the program sees no
network, no process but its own, and a file system in memory that holds the listed folders,
read-only, and `/sandbox`, where it runs; all its processes die with it. With `bubblewrap` all
that is there already, and this is the first process of it. Linux only.

Every process here dies with the one that started it, so nothing of a jail outlives the run, and
the one that waits for the program ends it past its wall clock or its memory, whoever else looks.
The exit code is that of the program; 120 says that the jail itself failed, with the reason on
descriptor REPORT, which the program does not get, after a line that says that it has begun.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
INSIDE = 1000
NOBODY = 65534
FAILED = 120
HERE = "/tmp"  # noqa: S108  anybody may look into it, and in here it hides nothing but itself
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
INODES = 4096
LOOK = 0.02
KILLED = 128 + signal.SIGKILL
MIB = 2**20

# System calls that a program of plain Python has no use for: memory that no limit of a process
# counts (System V, POSIX queues, memfd, io_uring, keys), namespaces and mounts of its own, other
# processes' memory. x86_64, aarch64.
REFUSED = {
    "x86_64": (
        *(29, 30, 31, 64, 68, 240, 319, 425, 447, 248, 249, 250),
        *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 433, 442),
        *(101, 298, 310, 311, 321, 323),
    ),
    "aarch64": (
        *(194, 195, 196, 190, 186, 180, 279, 425, 447, 217, 218, 219),
        *(41, 51, 40, 39, 97, 268, 428, 429, 430, 431, 432, 433, 442),
        *(117, 241, 270, 271, 280, 282),
    ),
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
CLONE_NEW_ANY = 0x7E020080
X32 = 0x40000000
LOAD, JUMP_EQUAL, JUMP_LEAST, JUMP_ANY, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, MISSING = 0x7FFF0000, 0x00050001, 0x00050026

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Build the jail and run the command in it."""
    report, command = int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(report, False)
    os.write(report, b"\n")  # it has begun
    try:
        with open(int(sys.argv[1])) as file:  # noqa: PTH123  pathlib costs its import
            config = json.load(file)
        group = config["group"] or ()
        for descriptor in group:
            os.set_inheritable(descriptor, False)
        _build(config)
        # The program may be of the same user, and would otherwise write into this one's memory.
        _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        _continue_in_child(_watching(config))
        alone = config["isolation"] != "limits"
        if alone:
            os.setsid()
        if group:
            os.write(group[0], b"0")
        for name, most in config["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        _refuse_calls(needed=alone)
        os.execve(command[0], command, config["environment"])  # noqa: S606  what the jail is for
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(FAILED)


def _build(config: dict[str, Any]) -> None:
    """Put up what is not there yet, and write the program where it will run."""
    if config["isolation"] != "bubblewrap":  # whose first process has no parent in sight
        _die_with_parent(lambda: os.getppid() == config["parent"])
    if config["isolation"] == "namespaces":
        _enter_namespaces()
        _continue_in_child(_waited)
        _change_root(config)
    else:
        os.chdir(config["directory"])
        _write("main.py", config["program"])


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  as above
        file.write(text)


def _die_with_parent(parent_lives: Callable[[], bool] = lambda: True) -> None:
    """Be killed as the parent ends; at once where it has. A change of user forgets this."""
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if not parent_lives():
        os._exit(KILLED)


def _fork() -> int:
    """Fork; the child dies with its parent, in the moment after the fork too."""
    ends, held = os.pipe()
    if child := os.fork():
        os.close(ends)
        os.set_inheritable(held, False)
        return child
    os.close(held)
    _die_with_parent(lambda: not select.select([ends], [], [], 0)[0])
    os.close(ends)
    return 0


def _continue_in_child(wait: Callable[[int], int]) -> None:
    """Fork; the parent ends as the child does."""
    if child := _fork():
        os._exit(wait(child))


def _waited(child: int) -> int:
    """Wait for a child, and for orphans that come to the first process; the child's exit code."""
    while True:
        found, status = os.wait()
        if found == child:
            return _code(status)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _watching(config: dict[str, Any]) -> Callable[[int], int]:
    """How to wait for the program: to its end, its wall clock, or its memory, all processes'.

    The kernel keeps the memory of a group; without one it is looked at. The first process of a
    namespace takes the others with it as it ends.
    """
    until = time.monotonic() + config["wall"]
    memory, group = config["memory"], config["group"]
    looks = config["isolation"] != "limits" and not group
    counts = config["isolation"] == "bubblewrap"  # whose root has no bound on files

    def wait(child: int) -> int:
        ends = {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        trouble, past = "", f"{memory // MIB} MiB of memory"
        while not trouble:
            found, status = os.waitpid(-1, os.WNOHANG)
            if found == child and not (group and _killed(group[1])):
                return _code(status)
            if found == child:
                return _ended(past)
            if found:
                continue
            left = max(0.0, until - time.monotonic())
            signal.sigtimedwait(ends, min(LOOK, left) if looks or counts else left)
            if time.monotonic() > until:
                trouble = "the wall clock"
            elif looks and _uses_more(memory):
                trouble = past
            elif counts and _many_files():
                trouble = f"{INODES} files"
        os.kill(child, signal.SIGKILL)
        return _ended(trouble)

    return wait


def _ended(trouble: str) -> int:
    os.write(2, f"\nended: past {trouble}\n".encode())
    return KILLED


def _killed(events: int) -> bool:
    """Whether the kernel has killed in a group for its memory."""
    lines = os.pread(events, 4096, 0).decode().splitlines()
    return any(name == "oom_kill" and int(count) for name, count in map(str.split, lines))


def _many_files() -> bool:
    """Whether there are more files than a root of our own would have had room for."""
    room = os.statvfs("/sandbox")
    return room.f_files - room.f_ffree > INODES


def _uses_more(memory: int) -> bool:
    """Whether all processes but this one have more memory; what they share is counted once."""
    own = ("1", str(os.getpid()))
    names = [name for name in os.listdir("/proc") if name.isdigit() and name not in own]  # noqa: PTH208
    if sum(map(_resident, names)) <= memory:
        return False  # the quick look, in which shared pages count in each
    return sum(map(_share, names)) > memory


def _resident(process: str) -> int:
    return int(_read(process, "statm").split()[1]) * os.sysconf("SC_PAGESIZE")


def _share(process: str) -> int:
    """A process's part of its pages; all of them where the kernel does not tell parts."""
    shares = map(str.split, _read(process, "smaps_rollup").splitlines())
    told = next((words[1] for words in shares if words[0] == "Pss:"), None)
    return _resident(process) if told is None else int(told) << 10


def _read(process: str, file: str) -> str:
    """A file about a process; of one that has just ended as of one without memory."""
    try:
        with open(f"/proc/{process}/{file}") as text:  # noqa: PTH123  as above
            return text.read()
    except OSError:
        return "0 0" if file == "statm" else ""


def _refuse_calls(*, needed: bool) -> None:
    """A filter of system calls, for this process and all that it starts."""
    machine = os.uname().machine
    if machine not in REFUSED and not needed:
        return
    lines = _filter(machine)
    body = b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for code, yes, no, value in lines
    )
    held = ctypes.create_string_buffer(body)

    class Program(ctypes.Structure):
        _fields_ = (("size", ctypes.c_ushort), ("lines", ctypes.c_void_p))

    program = Program(len(lines), ctypes.addressof(held))
    result = libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)
    if needed:
        _check(result, "seccomp")


def _filter(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter, line by line: code, jump if so, jump if not, value."""
    refused = REFUSED[machine]
    body = [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, MISSING)]
    for number in refused:
        body += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    return [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, 0),
        (JUMP_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
        *body,
        (JUMP_EQUAL, 0, 3, CLONE[machine]),
        (LOAD, 0, 0, 16),
        (JUMP_ANY, 0, 1, CLONE_NEW_ANY),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]


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
    if child := _fork():
        os.close(tell_unshared)
        if os.read(unshared, 1):
            _map(str(child), NOBODY, NOBODY)
            os.write(tell_mapped, b".")
        os._exit(_waited(child))
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
    _die_with_parent()  # which the change of user has forgotten
    flags = MS_NOSUID | MS_NODEV
    _mount("jail", HERE, "tmpfs", flags, f"size={config['disk']},nr_inodes={INODES},mode=755")
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
