"""One supervisor per attempt: it owns the processes of one training run until nothing of them is left.

Run as `python supervisor.py ATTEMPT_DIR`; reads `launch.json` there, needs the standard library only, neither a leader
nor a network. What always holds:

- At most one supervisor per attempt passes the claim (a hard link that only one can make), and none passes a fence.
- Slot locks are taken before the first process starts and are inherited by every process, so a slot is free exactly
  when the last process of its tenant is dead, whatever was killed in which order.
- `result.json` is linked into place once, complete and flushed, after every process of the attempt is gone.
- Dying supervisors take their processes with them (parent-death signal); what escapes is found by its marker.

It does not retry, schedule or judge: it reports one attempt's end with a class.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "1"
MARKER = "A3R_ATTEMPT"
RESULT_SCHEMA = "a3r/result/v1"
RESOLVED = "resolved_config.json"
CLIENT_FACTS = ("model_sha256", "data_sha256")
"""What a client may say about itself in env.json: only it knows what it has loaded."""
EVAL_KEYS = {"value", "n_items", "n_samples"}
RESERVE_BYTES = 256 * 1024
"""Preallocated in each attempt directory, given up when the disk is full so that the result can still be written."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)


def reached(point: str) -> None:
    """A named point of the life cycle; tests replace this function to die there."""


# ---- the world: clocks, processes, files -----------------------------------------------------------------------------


def now() -> float:
    """Seconds since boot, suspended time included: immune to changes of the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Kernel start tick of a living process; None when it is gone or a zombie. (pid, start_time) is never reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def marked_processes(nonce: str) -> list[int]:
    """Living processes whose environment carries the attempt's marker, except the caller."""
    marker = f"{MARKER}={nonce}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if marker in environment.split(b"\0") and start_time(int(entry)) is not None:
            found.append(int(entry))
    return found


def kill_marked(nonce: str, within_s: float = 10.0, keep: frozenset[int] = frozenset()) -> bool:
    """SIGKILL every marked process, again until none is left. True: proven gone; False: some survived `within_s`."""
    deadline = now() + within_s
    while True:
        alive = [pid for pid in marked_processes(nonce) if pid not in keep]
        if not alive:
            return True
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if now() > deadline:
            return False
        time.sleep(0.01)


def kill_children(within_s: float = 10.0) -> bool:
    """SIGKILL whatever was reparented to this subreaper, again until none is left. True: proven gone."""
    deadline = now() + within_s
    while True:
        reap()
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:
            return True
        if not children:
            return True
        for pid in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if now() > deadline:
            return False
        time.sleep(0.005)


def reap() -> dict[int, int]:
    """Collect every dead child: pid → wait status."""
    dead: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return dead
        if pid == 0:
            return dead
        dead[pid] = status


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_once(path: Path, data: dict[str, Any]) -> bool:
    """Put a complete, flushed file at `path` unless one is there. True: this call made it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(result_text(data))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    fsync_dir(path.parent)
    return True


def result_text(data: dict[str, Any]) -> str:
    """The bytes of a result or claim: equal for equal data."""
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def replace_file(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def file_sha(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


# ---- what the leader asked for ---------------------------------------------------------------------------------------


@dataclass
class Process:
    name: str
    argv: list[str]
    cwd: str
    env: dict[str, str]
    needs: list[str]
    main: bool
    ready: dict[str, Any] | None
    pid: int = 0
    exit: int | None = None
    """Exit code, negative signal number, or None while running or not started."""
    started: float = 0.0
    is_ready: bool = False

    @property
    def running(self) -> bool:
        return self.pid != 0 and self.exit is None


@dataclass
class Launch:
    """`launch.json`, written by the leader before it starts the supervisor."""

    raw: dict[str, Any]
    dir: Path
    processes: list[Process]

    @classmethod
    def load(cls, attempt_dir: Path) -> Launch:
        raw = json.loads((attempt_dir / "launch.json").read_text(encoding="utf-8"))
        processes = [
            Process(
                name=p["name"],
                argv=[str(a) for a in p["argv"]],
                cwd=p.get("cwd") or str(attempt_dir),
                env=dict(p.get("env") or {}),
                needs=list(p.get("needs") or []),
                main=bool(p.get("main")),
                ready=p.get("ready"),
            )
            for p in raw["processes"]
        ]
        return cls(raw, attempt_dir, start_order(processes))

    @property
    def nonce(self) -> str:
        return self.raw["nonce"]

    def timeout(self, name: str) -> float:
        value = (self.raw.get("timeouts") or {}).get(name)
        return math.inf if value is None else float(value)


def start_order(processes: list[Process]) -> list[Process]:
    """Processes so that each follows what it needs.

    Raises:
        ValueError: a cycle, an unknown name, or not exactly one main process.
    """
    names = {p.name for p in processes}
    if len([p for p in processes if p.main]) != 1:
        raise ValueError("exactly one process must be main; its exit ends the attempt")
    ordered: list[Process] = []
    waiting = list(processes)
    while waiting:
        done = {p.name for p in ordered}
        free = [p for p in waiting if set(p.needs) <= done]
        if not free:
            unknown = sorted({n for p in waiting for n in p.needs} - names)
            raise ValueError(
                f"processes need unknown ones: {unknown}" if unknown else "processes need each other in a circle"
            )
        ordered += free
        waiting = [p for p in waiting if p not in free]
    return ordered


# ---- following the metrics -------------------------------------------------------------------------------------------


@dataclass
class Metrics:
    """Reads appended JSON lines; a half-written last line waits for its end, a file that shrank is read anew."""

    path: Path
    step_key: str
    offset: int = 0
    partial: bytes = b""
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step → its last row: a resumed run may write a step twice."""
    last: dict[str, Any] = field(default_factory=dict)
    first_at: float | None = None
    last_at: float | None = None
    bad_lines: int = 0

    @property
    def steps(self) -> list[int]:
        return sorted(self.rows)

    def adopt_prefix(self) -> dict[int, dict[str, Any]]:
        """Rows an earlier attempt left behind: steps done, but no signs of life of this one."""
        self.poll()
        self.first_at = self.last_at = None
        return dict(self.rows)

    def poll(self) -> list[dict[str, Any]]:
        """New rows since the last call."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.partial, self.rows = 0, b"", {}
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *lines, self.partial = (self.partial + data).split(b"\n")
        rows = [row for row in map(self._parse, lines) if row is not None]
        for row in rows:
            self.rows[int(row[self.step_key])] = row
            self.last = row
            self.last_at = now()
            self.first_at = self.first_at or self.last_at
        return rows

    def read_whole(self) -> None:
        """Forget what was followed and read the file as it now is: what counts is what is on disk."""
        fresh = Metrics(self.path, self.step_key)
        fresh.poll()
        self.rows, self.bad_lines, self.last = fresh.rows, fresh.bad_lines, fresh.last

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except ValueError:
            self.bad_lines += 1
            return None
        if not isinstance(row, dict) or not isinstance(row.get(self.step_key), int):
            self.bad_lines += 1
            return None
        return row


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_nan(row: dict[str, Any]) -> str | None:
    """The first metric of a row that is not a finite number."""
    return next((k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)), None)


@dataclass
class StopRules:
    """When a running attempt counts as diverged: a metric that is no number, or one above a bound for some steps."""

    nan_counts: bool
    above: list[dict[str, Any]]
    streaks: dict[int, int] = field(default_factory=dict)

    def check(self, row: dict[str, Any]) -> str | None:
        """The evidence when this row ends the run."""
        bad = is_nan(row) if self.nan_counts else None
        if bad:
            return f"{bad} is {row[bad]} at step {row.get('step')}"
        for index, rule in enumerate(self.above):
            value = row.get(rule["metric"])
            hit = isinstance(value, int | float) and value > rule["value"]
            self.streaks[index] = self.streaks.get(index, 0) + 1 if hit else 0
            if self.streaks[index] >= int(rule.get("for_steps", 1)):
                return f"{rule['metric']} is {value}, above {rule['value']} for {self.streaks[index]} steps"
        return None


# ---- why it ended ----------------------------------------------------------------------------------------------------

KILLERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
"""Signals that come from outside; a program that faults dies by others."""

TEXT_RULES: list[tuple[str, re.Pattern[str]]] = [
    (
        "oom",
        re.compile(r"out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate|Cannot allocate memory", re.I),
    ),
    ("oom", re.compile(r"^MemoryError", re.M)),
    ("infra", re.compile(r"No space left on device|ENOSPC|database or disk is full|Input/output error", re.I)),
    ("infra", re.compile(r"\bXid\b|uncorrectable ECC|NCCL.*(remote process exited|peer)|Address already in use", re.I)),
    (
        "config",
        re.compile(
            r"ConfigError|unknown key|unrecognized arguments|bad_config|config_conflict|usage: .*\n.*error:", re.I
        ),
    ),
    (
        "external_dep",
        re.compile(
            r"(HTTP[^\n]{0,40}|status[^\n]{0,20}|Error code: )\b(401|402|403|429|50[0234])\b"
            r"|RateLimitError|AuthenticationError|insufficient_quota|Temporary failure in name resolution"
        ),
    ),
    ("code", re.compile(r"^Traceback \(most recent call last\):", re.M)),
]
"""First match wins: the specific evidence stands before the traceback that carries it."""


def classify_text(text: str) -> tuple[str, str] | None:
    """Failure class and the line that shows it."""
    for name, pattern in TEXT_RULES:
        match = pattern.search(text)
        if match:
            return name, last_error_line(text) if name == "code" else line_at(text, match.start())
    return None


def line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else None].strip()[:300]


def last_error_line(text: str) -> str:
    """The exception line of the last traceback: unindented, after the last indented frame."""
    block = text[text.rfind("Traceback (most recent call last):") :].splitlines()[1:]
    return next((line.strip()[:300] for line in block if line and not line[0].isspace()), "traceback")


def signature(failure_class: str, evidence: str) -> str:
    """Equal for failures with the same cause: numbers, addresses and paths are blanked."""
    plain = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?|/[^\s'\":]+", "#", evidence)
    return hashlib.sha256(f"{failure_class}|{plain}".encode()).hexdigest()[:12]


def tail(path: Path, limit: int = 65536) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def config_difference(asked: dict[str, Any], resolved: dict[str, Any]) -> str | None:
    """A sentence on the first asked-for key that the client did not take as asked."""
    have = dict(flat(resolved))
    for key, value in flat(asked):
        if key not in have:
            return f"{key}: asked for {value!r}, absent from the resolved configuration"
        if not same_value(value, have[key]):
            return f"{key}: asked for {value!r}, resolved to {have[key]!r}"
    return None


def same_value(asked: Any, got: Any) -> bool:
    if isinstance(asked, bool) or isinstance(got, bool):
        return asked is got
    if isinstance(asked, int | float) and isinstance(got, int | float):
        return math.isclose(asked, got, rel_tol=1e-9)
    if isinstance(asked, list | tuple) and isinstance(got, list | tuple):
        return len(asked) == len(got) and all(map(same_value, asked, got))
    return asked == got


# ---- the attempt -----------------------------------------------------------------------------------------------------


class Fenced(Exception):
    """The leader has given this attempt up; nothing may be written for it any more."""


@dataclass
class End:
    """How an attempt ended."""

    status: str
    """COMPLETED, DIVERGED, FAILED or CANCELLED."""
    failure_class: str | None = None
    evidence: str = ""


class Supervisor:
    """Claims, starts, follows, ends and reports one attempt."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.dir = launch.dir
        self.lock_fds: list[int] = []
        metrics = launch.raw.get("metrics") or {}
        self.metrics = Metrics(self.dir / metrics.get("file", "metrics.jsonl"), metrics.get("step_key", "step"))
        stop = launch.raw.get("stop") or {}
        self.rules = StopRules(stop.get("nan", "diverged") is not None, list(stop.get("above") or []))
        self.prefix = self.metrics.adopt_prefix()
        self.eval_name = metrics.get("eval") or "eval.json"
        self.tick_s = float(launch.raw.get("tick_s", 0.25))
        self.times: dict[str, float | None] = {"queued": launch.raw.get("queued_at"), "started": time.time()}
        self.began = now()
        self.state = "claimed"
        self.asked_to_stop: str | None = None
        self.beat_at = self.weighed_at = -math.inf
        self.peak_rss = 0
        self.oom_before = oom_kills()

    # -- life cycle

    def run(self) -> int:
        """The whole attempt. Returns the process exit status: 0 reported, 3 fenced, 4 claimed by another."""
        try:
            self.check_fence()
            if not self.claim():
                return 4
            reached("claimed")
            self.check_fence()
            end = self.locked_run()
            self.check_fence()
        except Fenced:
            self.stop_processes(grace_s=0.0)
            return 3
        reached("before_result")
        self.report(end)
        reached("after_result")
        return 0

    def locked_run(self) -> End:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        refused = self.take_locks()
        if refused:
            return refused
        reached("locked")
        try:
            end = self.start_all() or self.follow()
        finally:
            reached("before_stop")
            self.stop_processes(self.launch.timeout("grace_s"))
        self.metrics.read_whole()
        return self.audit(end)

    def check_fence(self) -> None:
        if (self.dir / "fenced").exists():
            raise Fenced

    def claim(self) -> bool:
        identity = {
            "nonce": self.launch.nonce,
            "pid": os.getpid(),
            "starttime": start_time(os.getpid()),
            "boot_id": boot_id(),
            "host": os.uname().nodename,
            "supervisor": VERSION,
            "at": time.time(),
        }
        if not write_once(self.dir / "claim", identity):
            return False
        with contextlib.suppress(OSError), open(self.dir / "reserve", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        return True

    def take_locks(self) -> End | None:
        """Take every slot's lock in a fixed order. They stay with the process tree: never broken, never unlinked."""
        deadline = now() + float(self.launch.raw.get("lock_wait_s", 10.0))
        for path in sorted(self.launch.raw.get("locks") or []):
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self.check_fence()
                    if now() > deadline:
                        os.close(fd)
                        return End("FAILED", "infra", f"slot lock {Path(path).name} is still held by another tenant")
                    time.sleep(0.02)
            self.lock_fds.append(fd)
        return None

    # -- starting

    def start_all(self) -> End | None:
        """Start processes in order, each after what it needs is ready. An End when one does not get ready."""
        (self.dir / "log").mkdir(exist_ok=True)
        self.state = "starting"
        for process in self.launch.processes:
            try:
                self.spawn(process)
            except OSError as error:
                kind = "infra" if error.errno in (errno.ENOSPC, errno.EAGAIN, errno.ENOMEM) else "config"
                return End("FAILED", kind, f"{process.name} could not start: {error}")
            reached(f"spawned_{'main' if process.main else 'helper'}")
            end = self.await_ready(process)
            if end:
                return end
        self.state = "running"
        self.beat(force=True)
        return None

    def spawn(self, process: Process) -> None:
        parent = os.getpid()
        environment = os.environ | process.env | {MARKER: self.launch.nonce}
        log = os.open(self.dir / "log" / f"{process.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        program = process.argv[0]
        failed_read, failed_write = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._become(process, program, environment, parent, null, log, failed_write)
            os.close(failed_write)
            failed_write = -1
            code = os.read(failed_read, 16)
        finally:
            for fd in (log, null, failed_read, failed_write):
                if fd >= 0:
                    os.close(fd)
        if code:
            os.waitpid(pid, 0)
            raise OSError(int(code), os.strerror(int(code)), program)
        process.pid, process.started = pid, now()

    def _become(
        self, process: Process, program: str, environment: dict[str, str], parent: int, null: int, log: int, failed: int
    ) -> None:
        """In the child: die with the parent, keep the slot locks, become the program. Never returns."""
        try:
            os.setpgid(0, 0)
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(127)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for fd in self.lock_fds:
                os.set_inheritable(fd, True)
            os.chdir(process.cwd)
            os.execvpe(program, process.argv, environment)
        except OSError as error:
            os.write(failed, str(error.errno or errno.EINVAL).encode())
        finally:
            os._exit(127)

    def await_ready(self, process: Process) -> End | None:
        probe = process.ready
        if not probe or not (probe.get("http") or probe.get("file")):
            process.is_ready = True
            return None
        within = float(probe.get("within_s", 60.0))
        deadline = process.started + within
        while not self.is_ready(probe):
            end = self.interrupted() or self.helper_loss()
            if end:
                return end
            if process.exit is not None:
                return self.exit_end(process, f"{process.name} ended before it was ready")
            if now() > deadline:
                return End("FAILED", "timeout", f"{process.name} was not ready within {within:g} s")
            self.wait(min(self.tick_s, 0.25))
        process.is_ready = True
        return None

    def is_ready(self, probe: dict[str, Any]) -> bool:
        if probe.get("file"):
            return Path(probe["file"]).exists()
        import http.client  # both are slow to import, and only some blueprints probe by HTTP
        import urllib.request

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(probe["http"], timeout=2.0) as answer:
                return 200 <= answer.status < 300
        except (OSError, ValueError, http.client.HTTPException):
            return False

    # -- following

    def follow(self) -> End:
        """Until the main process ends, a clock runs out, a stop rule fires, a helper dies or someone says stop."""
        main = next(p for p in self.launch.processes if p.main)
        while True:
            end = self.new_rows() or self.interrupted()
            if end:
                return end
            if main.exit is not None:
                return self.new_rows() or self.exit_end(main, "")
            end = self.helper_loss() or self.clocks(main)
            if end:
                return end
            self.beat()
            self.wait(self.tick_s)

    def new_rows(self) -> End | None:
        for row in self.metrics.poll():
            reached("step")
            if self.times.get("first_step") is None:
                self.times["first_step"] = time.time()
            evidence = self.rules.check(row)
            if evidence:
                return End("DIVERGED", "diverged", evidence)
        return None

    def clocks(self, main: Process) -> End | None:
        """The three clocks: first step, stall, maximum."""
        at = now()
        if at - self.began > self.launch.timeout("max_s"):
            return End("FAILED", "timeout", f"longer than max_s = {self.launch.timeout('max_s'):g}")
        if self.metrics.last_at is None and at - main.started > self.launch.timeout("first_step_s"):
            return End("FAILED", "stalled", f"no first step within {self.launch.timeout('first_step_s'):g} s")
        if self.metrics.last_at is not None and at - self.metrics.last_at > self.launch.timeout("stall_s"):
            limit = self.launch.timeout("stall_s")
            return End("FAILED", "stalled", f"no new step for {limit:g} s after step {self.metrics.steps[-1]}")
        return None

    def interrupted(self) -> End | None:
        self.check_fence()
        if (self.dir / "stop").exists():
            return End("CANCELLED", None, tail(self.dir / "stop").strip() or "stopped")
        if self.asked_to_stop:
            return End("FAILED", "infra", f"the supervisor was told to end by {self.asked_to_stop}")
        return None

    def helper_loss(self) -> End | None:
        """A process the main one depends on has died: the attempt ends and the run resumes from its checkpoint."""
        for process in self.launch.processes:
            if not process.main and process.exit is not None:
                return self.exit_end(process, f"{process.name} ended under the run")
        return None

    def wait(self, seconds: float) -> None:
        """Sleep until a child dies or the tick is over; then collect the dead."""
        signal.sigtimedwait({signal.SIGCHLD}, max(seconds, 0.001))
        dead = reap()
        for process in self.launch.processes:
            if process.pid in dead and process.exit is None:
                process.exit = os.waitstatus_to_exitcode(dead[process.pid])

    def beat(self, force: bool = False) -> None:
        """Tell whoever looks how far it is; losing this file loses nothing."""
        if not force and now() - self.beat_at < 1.0:
            return
        self.beat_at = now()
        if self.beat_at - self.weighed_at > 5.0:
            self.weighed_at = self.beat_at
            self.peak_rss = max(self.peak_rss, sum(map(rss_bytes, marked_processes(self.launch.nonce))))
        with contextlib.suppress(OSError):
            replace_file(
                self.dir / "heartbeat",
                json.dumps({"state": self.state, "boottime": self.beat_at, "row": self.metrics.last}, default=str),
            )

    # -- ending

    def stop_processes(self, grace_s: float) -> None:
        """Ask, wait, kill: the groups first, then everything that carries the marker."""
        self.state = "finishing"
        grace_s = min(grace_s, 3600.0) if math.isfinite(grace_s) else 10.0
        main_first = sorted(self.launch.processes, key=lambda p: not p.main)
        for process in main_first:
            if process.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM if grace_s else signal.SIGKILL)
        deadline = now() + grace_s
        while any(p.running for p in self.launch.processes) and now() < deadline:
            self.wait(0.05)
        for process in self.launch.processes:
            if process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        killed_all = kill_marked(self.launch.nonce) and kill_children()
        for fd in self.lock_fds if killed_all else []:
            os.close(fd)
        self.lock_fds = []

    def exit_end(self, process: Process, context: str) -> End:
        """What an exit status and the logs say."""
        code = process.exit
        if code == 0 and process.main:
            return End("COMPLETED")
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        prefix = f"{context or process.name + ' ended'} ({how})"
        own = classify_text(tail(self.dir / "log" / f"{process.name}.txt"))
        if code is not None and -code in KILLERS:
            if (own and own[0] == "oom") or (code == -signal.SIGKILL and oom_kills() > self.oom_before):
                return End("FAILED", "oom", f"{prefix}: {own[1] if own else 'the out-of-memory killer'}")
            return End("FAILED", "infra", f"{prefix}: killed from outside")
        found = own or self.helpers_evidence()
        if found:
            return End("FAILED", found[0], f"{prefix}: {found[1]}")
        if code == 2 and not self.metrics.steps:
            return End("FAILED", "config", f"{prefix}: the command line was refused")
        return End("FAILED", "code" if code is not None and code < 0 else "unknown", prefix)

    def helpers_evidence(self) -> tuple[str, str] | None:
        """What the other processes' logs say. That they refuse requests is their trade and does not count."""
        for process in self.launch.processes:
            found = classify_text(tail(self.dir / "log" / f"{process.name}.txt"))
            if found and found[0] in ("oom", "infra", "code"):
                return found
        return None

    def audit(self, end: End) -> End:
        """Compare what the client claims with what was seen. Only ends that would count as results are audited."""
        if end.status not in ("COMPLETED", "DIVERGED"):
            return end
        asked = self.launch.raw.get("asked")
        if asked is not None:
            try:
                resolved = json.loads((self.dir / self.launch.raw.get("resolved", RESOLVED)).read_text())
            except (FileNotFoundError, ValueError):
                return End("FAILED", "config", "the client wrote no readable resolved configuration")
            difference = config_difference(asked, resolved)
            if difference:
                return End("FAILED", "config", difference)
        if end.status != "COMPLETED":
            return end
        return self.audit_steps() or self.audit_required() or end

    def audit_steps(self) -> End | None:
        seen = self.metrics.steps
        last = seen[-1] if seen else 0
        expected = self.launch.raw.get("expect_steps")
        if expected is not None and seen != list(range(1, int(expected) + 1)):
            return End("FAILED", "fabricated", f"the client ended well with {len(seen)} of {expected} steps measured")
        if len({b - a for a, b in itertools.pairwise(seen)}) > 1:
            return End("FAILED", "fabricated", f"the measured steps up to {last} have holes")
        claimed = self.evaluation().get("steps", {}).get("value")
        if claimed is not None and claimed != last:
            return End("FAILED", "fabricated", f"the client claims {claimed:g} steps, the metrics end at {last}")
        return None

    def evaluation(self) -> dict[str, Any]:
        """The client's numbers measured at the end: {metric: {value, n_items?, n_samples?}}."""
        found = read_json(self.dir / self.eval_name) or {}
        values = {name: v if isinstance(v, dict) else {"value": v} for name, v in found.items()}
        return {name: v for name, v in values.items() if is_number(v.get("value")) and set(v) <= EVAL_KEYS}

    def audit_required(self) -> End | None:
        known = set(self.metrics.last) | set(self.evaluation())
        missing = [m for m in self.launch.raw.get("required_metrics") or [] if m not in known]
        if missing:
            return End("FAILED", "fabricated", f"required metrics were not written: {', '.join(missing)}")
        return None

    def report(self, end: End) -> None:
        """Write the result. A full disk is answered by giving up the reserve, then by waiting."""
        result = self.result(end)
        for pause in (0.0, 0.0, 1.0, 5.0, 30.0, 120.0):
            time.sleep(pause)
            try:
                write_once(self.dir / "result.json", result)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.dir / "reserve")
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                result["provenance"]["extra"]["disk_full"] = "the result waited for space"
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.dir / "reserve")
        raise OSError(errno.ENOSPC, "the result could not be written: the disk is full", str(self.dir))

    def resumed_from(self) -> int | None:
        """The last step of the earlier attempt that stands unchanged in front of this one's; None: began anew."""
        kept = [step for step, row in self.prefix.items() if self.metrics.rows.get(step) == row]
        return max(kept, default=None)

    def result(self, end: End) -> dict[str, Any]:
        raw = self.launch.raw
        code = next(p for p in self.launch.processes if p.main).exit
        spent = read_json(self.dir / "usage.json") or {}
        seconds = now() - self.began
        told = read_json(self.dir / "env.json") or {}
        facts = raw.get("provenance", {}) | {k: told[k] for k in CLIENT_FACTS if isinstance(told.get(k), str)}
        extra = facts.get("extra", {}) | {
            "cpu_s": f"{cpu_seconds():.3f}",
            "peak_rss_bytes": str(self.peak_rss),
            "bad_metric_lines": str(self.metrics.bad_lines),
        }
        resolved = self.launch.raw.get("resolved", RESOLVED)
        return {
            "schema": RESULT_SCHEMA,
            **{key: raw[key] for key in ("run", "arm", "blueprint", "seed", "replicate", "attempt", "nonce")},
            "status": end.status,
            "failure_class": end.failure_class,
            "failure_detail": end.evidence,
            "exit": {
                "code": code if code is not None and code >= 0 else None,
                "signal": -code if code is not None and code < 0 else None,
            },
            "steps": self.metrics.steps[-1] if self.metrics.steps else 0,
            "resumed_from": self.resumed_from(),
            "times": self.times | {"ended": time.time()},
            "usage": {
                "wall_s": seconds,
                "slot_s": seconds * len(raw.get("locks") or []),
                "gpu_s": seconds * int(raw.get("gpus") or 0),
                "llm_tokens": int(spent.get("llm_tokens") or 0),
                "usd": float(spent.get("usd") or 0.0),
            },
            "provenance": facts
            | {
                "seed": raw["seed"],
                "host": os.uname().nodename,
                "boot_id": boot_id(),
                "resolved_config_sha256": file_sha(self.dir / resolved),
                "extra": extra,
            },
            "metrics": self.evaluation(),
            "files": {
                name: sha
                for name in (self.metrics.path.name, self.eval_name, resolved, "launch.json")
                if (sha := file_sha(self.dir / name))
            },
        }


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def cpu_seconds() -> float:
    """CPU time of all collected children."""
    times = os.times()
    return times.children_user + times.children_system


def oom_kills() -> int:
    """Kills by the kernel's out-of-memory killer on this machine since boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def detach() -> None:
    """Become a session leader that no terminal, no tmux and no parent can take down."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: supervisor.py ATTEMPT_DIR", file=sys.stderr)
        return 2
    directory = Path(argv[0]).resolve()
    detach()
    supervisor = Supervisor(Launch.load(directory))

    def on_term(number: int, _frame: Any) -> None:
        supervisor.asked_to_stop = signal.Signals(number).name

    signal.signal(signal.SIGTERM, on_term)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
