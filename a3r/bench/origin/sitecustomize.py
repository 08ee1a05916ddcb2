"""Notes where a process loads certain packages from, the moment it does: put first on PYTHONPATH by the benchmark.

Reads `A3R_BENCH_MODULES` (names with commas) and appends a line per package to the file `A3R_BENCH_ORIGINS`. A process
that is killed later has told it already. Finds nothing itself: it asks the finders behind it.
"""

import json
import os
import sys
from importlib.machinery import PathFinder


class Noting:
    """A finder that notes what the path finder finds for the packages under test."""

    def __init__(self, names, file):
        self.names = names
        self.file = file

    def find_spec(self, name, path=None, target=None):
        if path is not None or name not in self.names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            where = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
            line = json.dumps({"module": name, "origin": os.path.realpath(where), "pid": os.getpid()}) + "\n"
            fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(fd, line.encode())
            os.close(fd)
        return spec


if os.environ.get("A3R_BENCH_ORIGINS"):
    sys.meta_path.insert(0, Noting(os.environ["A3R_BENCH_MODULES"].split(","), os.environ["A3R_BENCH_ORIGINS"]))
