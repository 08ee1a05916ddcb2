"""The simulated client with a witness: it takes locks that no product code knows, one for its run and one per slot.

The kernel holds them exactly as long as this process or its stray grandchild lives, so a second process of the same
run, or on the same slot, is seen without sampling and without races.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def take(folder: Path, name: str) -> None:
    fd = os.open(folder / name.replace("/", "_"), os.O_RDWR | os.O_CREAT, 0o644)
    os.set_inheritable(fd, True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open(folder / "violations", "a", encoding="utf-8") as file:
            file.write(f"{name} is held by another process ({os.environ['A3R_RUN']}, pid {os.getpid()})\n")


def stray() -> None:
    """A double-forked process in a session of its own, which no process group reaches."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(1.0)
        os._exit(0)
    os.wait()


def main() -> int:
    arguments = sys.argv[1:]
    if "--print-schema" not in arguments:
        attempt_dir = Path(arguments[arguments.index("--out") + 1])
        folder = Path(os.environ["A3R_FAULT_DIR"])
        take(folder, "run-" + os.environ["A3R_RUN"])
        for lock in json.loads((attempt_dir / "launch.json").read_text())["locks"]:
            take(folder, "slot-" + Path(lock).name)
        if os.environ.get("A3R_STRAY"):
            stray()
    from a3r.simulate import main as simulate

    return simulate(arguments)


if __name__ == "__main__":
    sys.exit(main())
