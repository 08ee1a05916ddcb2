"""Wait for a training to get somewhere, and return as soon as it has, or cannot any more.

    python wait.py --metrics runs/x/metrics.jsonl --step 20 --pid 4711 --limit-s 3600
    python wait.py --server http://127.0.0.1:10086 --metric reward/mean --above 0.5 --limit-s 3600
    python wait.py --log server.log --line 'swarm server at' --pid 4711 --limit-s 60

Exit status: 0 what was waited for is there; 3 the process ended first; 4 the server failed or went away; 5 a line of
--bad was logged; 124 the limit passed; 2 the command line is wrong. The last line says which, with the last step seen.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

REACHED, USAGE, ENDED, SERVER_GONE, BAD_LINE, LIMIT = 0, 2, 3, 4, 5, 124
LOOK_S = 0.5
AWAY_S = 30.0
"""A server may be silent for so long: it may be restarting."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a training script")
    parser.add_argument("--server", help="address of a swarm server; key in SWARMTUNE_KEY where it has keys")
    parser.add_argument("--log", type=Path, help="a log file, for --line and --bad")
    parser.add_argument("--pid", type=int, help="give up when this process has ended")
    parser.add_argument("--step", type=int, help="reached when this step is done")
    parser.add_argument("--metric", help="a metric's name, for --above, --below, --moves")
    parser.add_argument("--above", type=float)
    parser.add_argument("--below", type=float)
    parser.add_argument(
        "--moves", type=float, metavar="BY", help="reached when it differs so much from its first value"
    )
    parser.add_argument("--line", help="regular expression of a log line to wait for")
    parser.add_argument("--bad", help="regular expression of a log line that ends the waiting, such as 'Traceback'")
    parser.add_argument("--end", action="store_true", help="wait for the end of --pid: its end is what is waited for")
    parser.add_argument("--limit-s", type=float, required=True, help="wait no longer")
    asked = parser.parse_args()
    complaint = wrong(asked)
    if complaint:
        print(complaint, file=sys.stderr)
        return USAGE
    status, sentence = watch(asked)
    print(sentence)
    return status


def wrong(asked: argparse.Namespace) -> str:
    """What is missing on the command line; empty when nothing is."""
    bounds = [asked.above, asked.below, asked.moves]
    if asked.metric and all(b is None for b in bounds):
        return "--metric: say --above, --below or --moves"
    if not asked.metric and any(b is not None for b in bounds):
        return "--above, --below, --moves: say which --metric"
    if (asked.step is not None or asked.metric) and not (asked.metrics or asked.server):
        return "--step and --metric: say where they are read, --metrics FILE or --server URL"
    if (asked.line or asked.bad) and not asked.log:
        return "--line and --bad: say which --log"
    if asked.end and asked.pid is None:
        return "--end: say which --pid"
    if asked.step is None and not asked.metric and not asked.line and not asked.end:
        return "nothing to wait for: say --step, --metric, --line or --end"
    return ""


def watch(asked: argparse.Namespace) -> tuple[int, str]:
    began = time.monotonic()
    silent_since: float | None = None
    rows: list[dict] = []
    while True:
        running = asked.pid is None or alive(asked.pid)  # before reading: what it wrote last is then read too
        try:
            rows = read_rows(asked, rows)
            silent_since = None
        except ServerFailed as failed:
            return SERVER_GONE, f"server failed: {failed}"
        except OSError as error:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > AWAY_S:
                return SERVER_GONE, f"no server answers at {asked.server} for {AWAY_S:g} s: {error}; {last(rows)}"
        text = asked.log.read_text(errors="replace") if asked.log and asked.log.exists() else ""
        if found := reached(asked, rows, text, running):
            return REACHED, f"{found}; {last(rows)}"
        if asked.bad and (hit := re.search(asked.bad, text)):
            return BAD_LINE, f"logged: {text[hit.start() :].splitlines()[0]}; {last(rows)}"
        if not running:
            return ENDED, f"process {asked.pid} has ended; {last(rows)}"
        if time.monotonic() - began > asked.limit_s:
            return LIMIT, f"not within {asked.limit_s:g} s; {last(rows)}"
        time.sleep(LOOK_S)


def reached(asked: argparse.Namespace, rows: list[dict], text: str, running: bool) -> str:
    """What came true; empty while nothing has."""
    if asked.end and not running:
        return f"process {asked.pid} has ended"
    if asked.line and (hit := re.search(asked.line, text)):
        return f"logged: {text[hit.start() :].splitlines()[0]}"
    if asked.step is not None and rows and rows[-1]["step"] >= asked.step:
        return f"step {asked.step} is done"
    values = [row[asked.metric] for row in rows if asked.metric in row] if asked.metric else []
    if values and asked.above is not None and values[-1] > asked.above:
        return f"{asked.metric} is {values[-1]:g}, above {asked.above:g}"
    if values and asked.below is not None and values[-1] < asked.below:
        return f"{asked.metric} is {values[-1]:g}, below {asked.below:g}"
    if values and asked.moves is not None and abs(values[-1] - values[0]) >= asked.moves:
        return f"{asked.metric} moved from {values[0]:g} to {values[-1]:g}"
    return ""


def last(rows: list[dict]) -> str:
    if not rows:
        return "no step seen"
    reward = rows[-1].get("reward/mean")
    return f"last step {rows[-1]['step']}" + (f", reward/mean {reward:.3f}" if reward is not None else "")


class ServerFailed(Exception):
    """The server is in state failed: it will not get anywhere by itself."""


def read_rows(asked: argparse.Namespace, rows: list[dict]) -> list[dict]:
    """All steps so far, one mapping each."""
    if asked.server:
        status = get(f"{asked.server}/v1/status")
        if status["state"] == "failed":
            raise ServerFailed(status.get("reason") or "it says no reason")
        after = rows[-1]["step"] if rows and rows[-1]["step"] <= status["step"] else 0
        new = [r["metrics"] | {"step": r["step"]} for r in get(f"{asked.server}/v1/steps?after={after}&wait_s=2")]
        return [*(rows if after else []), *new]
    if asked.metrics and asked.metrics.exists():
        whole = asked.metrics.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]
    return rows


def get(url: str):
    key = os.environ.get("SWARMTUNE_KEY")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({})) if "127.0.0.1" in url else None
    with (opener.open if opener else urllib.request.urlopen)(request, timeout=15) as answer:
        return json.load(answer)


def alive(pid: int) -> bool:
    """Runs and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return Path("/proc").is_dir() is False


if __name__ == "__main__":
    sys.exit(main())
