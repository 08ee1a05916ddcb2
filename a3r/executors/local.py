"""Attempts on this machine: a supervisor per attempt, and a tmux server per campaign that shows them.

The tmux server is a window, not a parent: its panes follow log files. Losing it loses the view; it is opened again at
the next look. It has a socket of its own and nothing here talks to any other tmux server.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from a3r import supervisor as sv
from a3r.executor import Handle, Life, Sight
from a3r.hosts import Host

SUPERVISOR = Path(sv.__file__)
KEEP_SESSIONS = 8
"""Windows of ended attempts stay readable until this many newer ones exist."""


class LocalExecutor:
    def __init__(self, campaign: Path, view: bool = True, supervisor: Path | None = None) -> None:
        self.campaign = campaign.resolve()
        self.supervisor = supervisor or SUPERVISOR
        self.socket = "a3r-" + hashlib.sha256(str(self.campaign).encode()).hexdigest()[:10]
        self.tmux = shutil.which("tmux") if view else None
        self.wants_view = view
        self._shown: list[Handle] = []
        self._launchers: list[subprocess.Popen[bytes]] = []
        """Supervisors leave their launcher at once; these are the ones whose end has not been collected yet."""

    def check(self, host: Host) -> None:
        """This machine is always reachable."""

    def start(self, handle: Handle, secrets: dict[str, str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not looks_secret(k)} | secrets
        with open(handle.directory / "supervisor.log", "ab") as log:
            launcher = subprocess.Popen(
                [sys.executable, "-S", "-E", str(self.supervisor), str(handle.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {sv.MARKER: handle.nonce},
                start_new_session=True,
            )
        self._launchers = [p for p in [*self._launchers, launcher] if p.poll() is None]

    def look(self, handle: Handle) -> Sight:
        result = sv.read_json(handle.directory / "result.json")
        claim = sv.read_json(handle.directory / "claim")
        if result is not None:
            return Sight(Life.FINISHED, result, claim)
        if claim is None:
            return Sight(Life.UNBORN)
        if claim.get("boot_id") != sv.boot_id():
            return Sight(Life.REBOOTED, claim=claim)
        alive = sv.start_time(int(claim["pid"])) == claim["starttime"]
        return Sight(Life.ALIVE if alive else Life.DEAD, claim=claim)

    def fence(self, handle: Handle) -> bool:
        handle.directory.mkdir(parents=True, exist_ok=True)
        sv.write_once(handle.directory / "fenced", {"nonce": handle.nonce, "by": os.getpid()})
        return sv.kill_marked(handle.nonce)

    # -- the view

    def open_view(self, handle: Handle, processes: list[str]) -> str | None:
        if not self.wants_view:
            return None
        if not self.tmux:
            return "tmux is not installed: runs have no windows; their logs are in the attempt directories"
        session = session_name(handle.run, handle.attempt)
        (handle.directory / "log").mkdir(exist_ok=True)
        argv: list[str] = []
        for index, name in enumerate(processes):
            log = handle.directory / "log" / f"{name}.txt"
            log.touch()
            follow = ["tail", "-n", "+1", "-F", str(log)]
            where = ["new-session", "-d", "-s", session] if index == 0 else ["new-window", "-d", "-t", f"={session}:"]
            argv += [*where, "-n", name, *follow, ";"]
            if index == 0:
                argv += ["set-option", "-t", f"={session}:", "remain-on-exit", "on", ";"]
        failed = self._tmux(*argv[:-1])
        if failed and "duplicate session" not in failed:
            return f"no window for {handle.run}: {failed}"
        self._close_old_windows(handle)
        return None

    def _close_old_windows(self, newest: Handle) -> None:
        """Close the windows of the attempts that ended longest ago, beyond KEEP_SESSIONS of them."""
        self._shown = [h for h in self._shown if h != newest] + [newest]
        ended = [h for h in self._shown if (h.directory / "result.json").exists()]
        for old in ended[:-KEEP_SESSIONS]:
            self._tmux("kill-session", "-t", f"={session_name(old.run, old.attempt)}")
            self._shown.remove(old)

    def lost_view(self, handle: Handle) -> bool:
        """Whether an attempt that should have windows has none."""
        return (
            bool(self.tmux)
            and self._tmux("has-session", "-t", f"={session_name(handle.run, handle.attempt)}") is not None
        )

    def close_view(self) -> None:
        if self.tmux:
            self._tmux("kill-server")

    def attach_argv(self, handle: Handle) -> list[str]:
        return ["tmux", "-L", self.socket, "attach-session", "-t", f"={session_name(handle.run, handle.attempt)}"]

    def _tmux(self, *argv: str) -> str | None:
        """Run one tmux command on the campaign's own socket; None, or why it failed."""
        environment = {k: v for k, v in os.environ.items() if k not in ("TMUX", sv.MARKER)}
        try:
            done = subprocess.run(
                [self.tmux or "tmux", "-f", os.devnull, "-L", self.socket, *argv],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
                env=environment,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.strip() or f"tmux ended with {done.returncode}"


def session_name(run: str, attempt: int) -> str:
    """tmux takes no dots and colons in names."""
    return f"{run}-{attempt}".translate(str.maketrans("./: ", "_-__"))


def looks_secret(variable: str) -> bool:
    """Variables that processes get only when a blueprint names them."""
    return variable.upper().endswith(("_KEY", "_TOKEN", "_SECRET", "_PASSWORD"))
