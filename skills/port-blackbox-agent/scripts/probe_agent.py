"""Run an unchanged agent once against a swarm server and show what of it would train.

    python probe_agent.py --server http://127.0.0.1:10086 -- my-agent --base-url {base_url} --api-key {api_key} "task"

Claims one evaluation episode (it enters no batch), runs the command with a home folder and a working folder of its own,
and reads the merge report. {base_url}, {anthropic_base_url}, {api_key} and {model} are replaced in the command; the
environment has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_AUTH_TOKEN too.

Exit status: 0 its calls arrived and train; 1 something is wrong, the lines say what; 2 no server, no command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from swarmtune import SwarmClient
from swarmtune.client import Episode
from swarmtune.errors import SwarmError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--limit-s", type=float, default=600.0, help="the agent is killed after so long")
    parser.add_argument("--files", type=Path, help="a folder whose copy the agent works in; default: an empty one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the agent's command line")
    asked = parser.parse_args()
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if not command:
        print("no command: write it behind --", file=sys.stderr)
        return 2
    try:
        with SwarmClient(asked.server, api_key=os.environ.get("SWARMTUNE_KEY"), patience_s=5.0) as swarm:
            episode = swarm.claim("probe-agent", kind="evaluate", wait_s=120.0)
            try:
                status, said = run_agent(command, episode, asked.files, asked.limit_s)
                view, report = episode.view(), swarm.merge_report(episode.episode_id)
            finally:
                episode.abort("probe")
    except SwarmError as error:
        print(f"{asked.server}: {error}", file=sys.stderr)
        return 2
    return tell(status, said, view.calls, report)


def run_agent(command: list[str], episode: Episode, files: Path | None, limit_s: float) -> tuple[int, str]:
    """(exit status, the end of what it said); it and its children are gone afterwards."""
    values = {
        "base_url": episode.base_url,
        "anthropic_base_url": episode.anthropic_base_url,
        "api_key": episode.api_key,
        "model": episode.model,
    }
    with tempfile.TemporaryDirectory() as place:
        home, work = Path(place, "home"), Path(place, "work")
        home.mkdir()
        shutil.copytree(files, work) if files else work.mkdir()
        argv = command
        for name, value in values.items():
            argv = [word.replace(f"{{{name}}}", value) for word in argv]
        environment = {k: v for k, v in os.environ.items() if k in {"PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV"}}
        environment |= {
            "HOME": str(home),
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.api_key,
            "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
            "ANTHROPIC_API_KEY": episode.api_key,
            "ANTHROPIC_AUTH_TOKEN": episode.api_key,
        }
        with Path(place, "said").open("w+") as said:
            agent = subprocess.Popen(
                argv,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = agent.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = -signal.SIGKILL
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
            said.seek(0)
            return status, said.read()[-1500:]


def tell(status: int, said: str, calls: int, report: dict) -> int:
    """Print what happened; the exit status."""
    rows, left_out = report.get("rows", {}), report.get("left_out", {})
    print(f"agent ended with status {status}; calls {calls}; training rows {rows.get('text', 0)}")
    print(f"turns recognised by: {report.get('recognised', {})}; left out: {left_out or 'nothing'}")
    for stop in report.get("breaks", []):
        print(f"history broke: {stop}")
    ignored = {name for turn in report.get("turns", []) for name in turn.get("ignored", [])}
    if ignored:
        print(f"ignored fields: {', '.join(sorted(map(str, ignored)))}")
    wrong = []
    if status != 0:
        wrong.append(
            "the agent failed; its last lines are above" if status > 0 else "the agent was killed at its limit"
        )
        print(said)
    if calls == 0:
        wrong.append("no call arrived: the agent was not pointed at the episode's address, or stopped before asking")
    elif not rows.get("text"):
        wrong.append("calls arrived and none would train: see what was left out and why")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    if not wrong:
        print("good: its calls arrived and would train")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
