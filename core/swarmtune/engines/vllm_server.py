"""One vLLM server as a thing that comes up and goes down: a process of ours, or somebody else's address.

A started server's processes die with this one, however it ends (`vllm_launch`), and are ended by `close` in bounded
time. An attached server is only watched. Knows nothing of weights, versions or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from swarmtune.backend import StartFailed
from swarmtune.config import TrainConfig
from swarmtune.engines.vllm_client import VllmClient

POLL_S = 0.25
WATCH_S = 2.0
"""Between two looks at a server that is up."""
HANG_S = 60.0
"""A server that does not answer for so long counts as gone."""
TERM_GRACE_S = 3.0
_TAIL_LINES = 25
_ERROR = re.compile(r"\w+Error: |\berror: ")
LAUNCHER = Path(__file__).with_name("vllm_launch.py")
INTERPRETER_VARIABLE = "A3R_VLLM_PYTHON"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Server(Protocol):
    """What a replica needs to know of where its vLLM runs."""

    async def come_up(self) -> VllmClient:
        """Return a client of a server that answers, after starting one where that is ours to do.

        Raises:
            StartFailed: with the reason and what to do.
        """
        ...

    async def wait_down(self, client: VllmClient) -> str:
        """Return why the server is gone; never returns while it is well."""
        ...

    def last_words(self) -> str:
        """What its log says of the last error; empty where we have no log."""
        ...

    async def close(self) -> None:
        """End what `come_up` started. Idempotent."""
        ...


class AttachedServer:
    """Somebody else's server."""

    def __init__(self, url: str, *, start_s: float) -> None:
        self.name = url
        self._url = url
        self._start_s = start_s

    async def come_up(self) -> VllmClient:
        client = VllmClient(self._url)
        try:
            async with asyncio.timeout(self._start_s):
                while not await client.healthy(timeout_s=HANG_S):  # noqa: ASYNC110 - another's process sets no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await client.close()
            raise StartFailed(
                f"engine.vllm.urls: nothing healthy answers at {self._url} for {self._start_s:.0f} s; start it there"
            ) from None
        except BaseException:
            await client.close()
            raise
        return client

    async def wait_down(self, client: VllmClient) -> str:
        return await _silent(client, self._url)

    def last_words(self) -> str:
        return ""

    async def close(self) -> None:
        pass


class StartedServer:
    """A server that this process starts, on a port of 127.0.0.1, again after each end."""

    def __init__(
        self,
        name: str,
        interpreter: Path,
        arguments: Sequence[str],
        env: dict[str, str],
        log_file: Path,
        *,
        start_s: float,
    ) -> None:
        self.name = name
        self._interpreter = interpreter
        self._arguments = list(arguments)
        self._env = env
        self._log_file = log_file
        self._log_start = 0
        self._start_s = start_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def come_up(self) -> VllmClient:
        await self.close()
        port = _free_port()
        process = self._process = await self._spawn(port)
        client = VllmClient(f"http://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(self._start_s):
                while not await client.healthy(timeout_s=HANG_S):
                    if process.returncode is not None:
                        raise StartFailed(f"{self.name} {_ending(process.returncode)}; {self.last_words()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self._give_up(client)
            raise StartFailed(
                f"{self.name} did not answer within {self._start_s:.0f} s; raise engine.vllm.start_s, or see "
                f"{self._log_file}: {self.last_words()}"
            ) from None
        except BaseException:
            await self._give_up(client)
            raise
        return client

    async def wait_down(self, client: VllmClient) -> str:
        assert self._process is not None
        exited = asyncio.create_task(self._process.wait())
        silent = asyncio.create_task(_silent(client, self.name))
        try:
            await asyncio.wait([exited, silent], return_when=asyncio.FIRST_COMPLETED)
            return f"{self.name} {_ending(exited.result())}" if exited.done() else silent.result()
        finally:
            exited.cancel()
            silent.cancel()

    async def close(self) -> None:
        """SIGTERM, then SIGKILL; its children die with it."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TERM_GRACE_S):
                    await process.wait()
                    return
        await process.wait()

    async def _spawn(self, port: int) -> asyncio.subprocess.Process:
        try:
            with self._log_file.open("ab") as sink:
                self._log_start = sink.tell()
                return await asyncio.create_subprocess_exec(
                    *(str(self._interpreter), str(LAUNCHER), "--parent", str(os.getpid())),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *self._arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env=self._env,
                )
        except OSError as error:
            raise StartFailed(f"{self.name} could not be started: {error}") from error

    async def _give_up(self, client: VllmClient) -> None:
        await client.close()
        await self.close()

    def last_words(self) -> str:
        """The tail of the log goes to our own."""
        with self._log_file.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()[-200:]
        print("\n".join(lines[-_TAIL_LINES:]), file=sys.stderr, flush=True)
        errors = [line for line in lines if _ERROR.search(line)]
        return (errors or lines or ["it wrote nothing"])[0 if errors else -1].rsplit("] ", 1)[-1].strip()


async def _silent(client: VllmClient, name: str) -> str:
    """Return when the server has not been healthy for HANG_S."""
    loop = asyncio.get_running_loop()
    last = loop.time()
    while loop.time() - last < HANG_S:
        await asyncio.sleep(WATCH_S)
        if await client.healthy(timeout_s=HANG_S / 2):
            last = loop.time()
    return f"{name} has not answered for {HANG_S:.0f} s"


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended by itself with exit code {code}"
    hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}){hint}"


def _free_port() -> int:
    """A port that was free a moment ago; a server that loses it to another process is started again elsewhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# How a server is started.


def find_interpreter(wanted: str | None) -> Path:
    """The interpreter that has vLLM.

    Raises:
        StartFailed: there is none.
    """
    beside = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"
    path = Path(wanted or os.environ.get(INTERPRETER_VARIABLE) or beside).expanduser()
    how = f"run scripts/vllm-cpu, or set engine.vllm.python or ${INTERPRETER_VARIABLE} to an interpreter with vLLM"
    if not path.is_file():
        raise StartFailed(f"no interpreter with vLLM: {path} does not exist; {how}")
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if subprocess.run([path, "-P", "-c", look], env=env, capture_output=True, check=False).returncode != 0:
        raise StartFailed(f"{path} has no vLLM; {how}")
    return path


def server_arguments(config: TrainConfig, model_path: Path, *, context_length: int) -> list[str]:
    """vLLM's command line for a configuration, without the address; `engine.vllm.args` come last."""
    vllm = config.engine.vllm
    arguments = [
        *("--model", str(model_path), "--served-model-name", SERVED_NAME),
        *("--dtype", DTYPES[vllm.dtype or config.trainer.dtype]),
        *("--max-model-len", str(context_length)),
        *("--max-num-seqs", str(config.engine.max_batch + config.evaluation.slots)),
        *("--seed", str(config.seed), "--max-logprobs", "21"),
        *("--structured-outputs-config", json.dumps({"backend": "guidance"})),
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    if sends_adapter(config):
        assert config.lora is not None
        arguments += ["--enable-lora", "--max-lora-rank", str(_lora_rank(config.lora.rank))]
        arguments += ["--max-loras", "2", "--max-cpu-loras", "2"]
    if vllm.sync == "ipc":
        arguments += ["--weight-transfer-config", json.dumps({"backend": "ipc"})]
    if not _has_gpu():
        # A prompt that is prefilled in pieces kills vLLM's CPU worker when it has a seed (0.32: a CPU generator has no
        # offset to set back).
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
        arguments += ["--max-num-batched-tokens", str(max(2048, context_length))]
    return [*arguments, *vllm.args]


SERVED_NAME = "policy"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM takes these as --max-lora-rank."""


def _lora_rank(rank: int) -> int:
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise StartFailed(f"lora.rank {rank} is more than vLLM takes ({LORA_RANKS[-1]}); set engine.vllm.lora to merged")


def sends_adapter(config: TrainConfig) -> bool:
    return config.lora is not None and config.engine.vllm.lora == "adapter"


def server_environment(config: TrainConfig, device: str | None) -> dict[str, str]:
    """The environment of one replica."""
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sends_adapter(config):
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.engine.vllm.sync == "ipc":
        ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if device is not None:
        ours["CUDA_VISIBLE_DEVICES"] = device
    if not _has_gpu():
        # Replicas and trainer share the cores: none of them may claim some for itself.
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if config.engine.threads is not None:
        ours["OMP_NUM_THREADS"] = str(config.engine.threads)
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    return inherited | ours | config.engine.vllm.env


def _has_gpu() -> bool:
    """Whether there are NVIDIA or AMD devices, without loading torch."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def make_servers(config: TrainConfig, model_path: Path, work_dir: Path, *, context_length: int) -> list[Server]:
    """The servers of a configuration; nothing runs yet.

    Raises:
        StartFailed: no interpreter with vLLM.
    """
    vllm = config.engine.vllm
    if vllm.urls:
        return [AttachedServer(url, start_s=vllm.start_s) for url in vllm.urls]
    interpreter = find_interpreter(vllm.python)
    arguments = server_arguments(config, model_path, context_length=context_length)
    servers: list[Server] = []
    for i in range(vllm.replicas):
        device = vllm.devices[i % len(vllm.devices)] if vllm.devices else None
        env = server_environment(config, device)
        log_file = work_dir / f"vllm-{i}.log"
        servers.append(StartedServer(f"vLLM server {i}", interpreter, arguments, env, log_file, start_s=vllm.start_s))
    return servers
