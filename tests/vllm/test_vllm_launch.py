"""How vLLM's own server is started, with a stand-in of the vLLM package in the interpreter's path."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmtune.backend import StartFailed
from swarmtune.engines.vllm_server import LAUNCHER, StartedServer, find_interpreter

SAFETY_S = 180.0
PACKAGE = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/structured_output/__init__.py": "",
    "vllm/v1/structured_output/utils.py": """
        def apply_grammar_bitmask(scheduler_output, grammar_output, input_batch, logits):
            logits[:, grammar_output] = float("-inf")
        """,
    "vllm/v1/sample/__init__.py": "",
    "vllm/v1/sample/sampler.py": """
        import torch
        _SAMPLING_EPS = 1e-5
        class Sampler(torch.nn.Module):
            def forward(self, logits, sampling_metadata):
                return self.compute_logprobs(logits)
            @staticmethod
            def compute_logprobs(logits):
                return logits.log_softmax(dim=-1, dtype=torch.float32)
        """,
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/launchers/__init__.py": "",
    "vllm/entrypoints/launchers/api_server/__init__.py": "",
    "vllm/entrypoints/launchers/api_server/entry.py": """
        import http.server, multiprocessing, os, pathlib, sys, time

        def work(report):
            from vllm.v1.sample import sampler
            ours = [entry for entry in sys.path if entry.endswith("swarmtune/engines")]
            report.put((os.getpid(), sampler.Sampler.__name__, ours))
            time.sleep(600)

        class Healthy(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

        def main():
            if "--die" in sys.argv:
                raise SystemExit("ValueError: no such model")
            context = multiprocessing.get_context("spawn")
            report = context.Queue()
            context.Process(target=work, args=(report,), daemon=True).start()
            pathlib.Path(os.environ["REPORT"]).write_text(repr(report.get()))
            port = int(sys.argv[sys.argv.index("--port") + 1])
            http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
        """,
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a stand-in of vLLM."""
    for name, text in PACKAGE.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return tmp_path / "packages"


@pytest.fixture
def make_server(package: Path, tmp_path: Path) -> Callable[..., StartedServer]:
    def make(*arguments: str) -> StartedServer:
        env = os.environ | {"PYTHONPATH": str(package), "REPORT": str(tmp_path / "report")}
        log_file = tmp_path / "vllm-0.log"
        return StartedServer("vLLM server 0", Path(sys.executable), arguments, env, log_file, start_s=SAFETY_S)

    return make


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SAFETY_S):
        while not condition():  # noqa: ASYNC110 - other processes set no events
            await asyncio.sleep(0.02)


def report(tmp_path: Path) -> tuple[int, str, list[str]]:
    """(pid of the worker, name of its sampler, entries of its path with our modules)."""
    return eval((tmp_path / "report").read_text())


async def test_server_comes_up_watched_and_goes_with_its_workers(make_server, tmp_path):
    server = make_server()
    client = await server.come_up()
    worker, sampler, ours = report(tmp_path)
    assert (sampler, ours) == ("WholeDistributionSampler", [])
    assert server.pid is not None and is_alive(server.pid) and is_alive(worker)
    down = asyncio.create_task(server.wait_down(client))
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(SAFETY_S):
        assert "signal 9 (SIGKILL)" in await down
    await until(lambda: not is_alive(worker))
    await client.close()
    client = await server.come_up()
    pid = server.pid
    await client.close()
    await server.close()
    assert not is_alive(pid)
    await until(lambda: not is_alive(report(tmp_path)[0]))


async def test_server_that_ends_at_start_says_why(make_server):
    with pytest.raises(StartFailed, match="no such model"):
        await make_server("--die").come_up()


async def test_all_of_it_dies_with_the_process_that_started_it(package, tmp_path):
    starter = textwrap.dedent(f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, {str(LAUNCHER)!r}, "--parent", str(os.getpid()), "--port", "0"])
        time.sleep(600)
    """)
    env = os.environ | {"PYTHONPATH": str(package), "REPORT": str(tmp_path / "report")}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", starter, env=env)
    await until((tmp_path / "report").exists)
    await until(lambda: (tmp_path / "report").read_text())
    worker = report(tmp_path)[0]
    server = int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert is_alive(server) and is_alive(worker)
    process.kill()
    await process.wait()
    await until(lambda: not is_alive(server) and not is_alive(worker))


def test_logprobs_are_of_the_whole_distribution(package):
    check = textwrap.dedent(f"""
        import runpy, torch, types
        launch = types.SimpleNamespace(**runpy.run_path({str(LAUNCHER)!r}, run_name="launch"))
        launch.report_whole_distribution()
        from vllm.v1.sample import sampler
        from vllm.v1.structured_output import utils
        made = sampler.Sampler()
        logits = torch.randn(3, 8)
        temperature = torch.tensor([0.0, 1.0, 0.5])
        divisor = torch.tensor([1.0, 1.0, 0.5])[:, None]
        wanted = (logits / divisor).log_softmax(-1)
        step = lambda l, t: made(l, types.SimpleNamespace(temperature=t))
        assert torch.allclose(step(logits.clone(), temperature), wanted), "temperature 0 counts as 1"
        masked = logits.clone()
        utils.apply_grammar_bitmask(None, [0, 1, 2], None, masked)
        assert masked[0, 0] == float("-inf")
        assert torch.allclose(step(masked, temperature), wanted), "a grammar cuts nothing from logprobs"
        assert torch.allclose(step(logits.clone(), None), logits.log_softmax(-1)), "all greedy"
        assert torch.allclose(made.compute_logprobs(logits), logits.log_softmax(-1)), "of a prompt"
    """)
    env = os.environ | {"PYTHONPATH": str(package)}
    subprocess.run([sys.executable, "-c", check], env=env, check=True, timeout=SAFETY_S)


def test_missing_interpreter_says_how_to_get_one(tmp_path, monkeypatch):
    with pytest.raises(StartFailed, match=r"gone does not exist; run scripts/vllm-cpu"):
        find_interpreter(str(tmp_path / "gone"))
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    monkeypatch.setenv("A3R_VLLM_PYTHON", str(without))
    with pytest.raises(StartFailed, match=r"has no vLLM; run scripts/vllm-cpu"):
        find_interpreter(None)
