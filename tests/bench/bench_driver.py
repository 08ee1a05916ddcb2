"""A benchmark process that dies by SIGKILL at a named point; the kill tests start it again and again.

`python bench_driver.py PROJECT RESULTS POINT HIT`: the HIT-th time POINT is reached, the process is gone.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_project import Project

from a3r.bench import measure, session, worktrees

root, folder, point, hit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
seen = 0


def reached(name: str) -> None:
    global seen
    seen += name == point
    if name == point and seen == hit:
        os.kill(os.getpid(), signal.SIGKILL)


measure.reached = reached
add = worktrees.Worktrees._add


def add_and_die(self, *args):
    add(self, *args)
    reached("worktree added")


worktrees.Worktrees._add = add_and_die
settle = session.Session._settle


def settle_and_die(self, *args):
    reached("judging")
    settle(self, *args)


session.Session._settle = settle_and_die
if __name__ == "__main__":
    project = Project(root, folder, Path(os.environ["WITNESS"]))
    sys.exit(int(project.run("ALL").exit))
