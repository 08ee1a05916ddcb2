"""One server process: takes its address and data folder, serves until told to end, and leaves nothing behind.

What always holds: the address and the folder are taken before any training is touched; SIGINT, SIGTERM and POST
/v1/shutdown end the process in bounded time with the training on disk.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from swarmtune.checkpoints import CheckpointError
from swarmtune.gateway.app import create_app
from swarmtune.gateway.auth import Capability, Keyring, refuse_open_bind
from swarmtune.server import SwarmServer

log = logging.getLogger(__name__)

CLOSE_CONNECTIONS_S = 2.0
"""How long open connections may finish once the training has stopped."""


GC_THRESHOLDS = (20_000, 20, 20)
"""Objects between collections, and how many of one generation before the next one is looked at too. A call leaves
hundreds of objects that the tree keeps; looking at them after every few calls costs more than they do."""


class ServeError(Exception):
    """The server cannot run here; the message says how to fix it."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 10086
    """0 takes a free one; server.json says which."""
    keys: Mapping[str, Iterable[Capability]] = field(default_factory=dict)
    fresh: bool = False
    """Leave earlier trainings in the data folder alone."""
    from_step: int | None = None
    """Begin a new run at this checkpoint of `from_run`, and go on from there."""
    from_run: str | None = None
    """A run in the data folder by name, or any run's folder; None is the last one in the data folder."""


def run(settings: ServeSettings, announce: Callable[[str], None]) -> None:
    """Serve until told to end. `announce` gets the URL once requests are answered.

    Raises:
        BindRefused, ServeError
    """
    has_control = any(Capability.CONTROL in capabilities for capabilities in settings.keys.values())
    refuse_open_bind(settings.host, has_control_key=has_control)
    with bound_socket(settings.host, settings.port) as listener, exclusive(settings.data_dir):
        try:
            uvloop.run(_serve(settings, listener, announce))
        except CheckpointError as error:
            raise ServeError(f"--from-step {settings.from_step}: {error}") from error
        except OSError as error:
            raise unusable(settings.data_dir, error) from error


def unusable(data_dir: Path, error: OSError) -> ServeError:
    if error.errno in {errno.EEXIST, errno.ENOTDIR}:
        return ServeError(f"--data-dir {data_dir}: it, or what is above it, is a file; give a folder")
    fix = "free some space" if error.errno in {errno.ENOSPC, errno.EDQUOT} else "make it writable for this user"
    return ServeError(f"--data-dir {data_dir}: {error.strerror or error}; {fix}, or give another folder")


async def _serve(settings: ServeSettings, listener: socket.socket, announce: Callable[[str], None]) -> None:
    server = SwarmServer(
        settings.data_dir, fresh=settings.fresh, from_step=settings.from_step, from_run=settings.from_run
    )
    logging.getLogger("aiohttp.server").addFilter(malformed_in_one_line)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, server.request_shutdown)
    app = create_app(server, Keyring(settings.keys))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_CONNECTIONS_S)
    await runner.setup()
    url = url_of(listener)
    try:
        await server.open()
        await web.SockSite(runner, listener, backlog=2048).start()
        collect_seldom()
        write_server_file(settings.data_dir, server.server_id, url)
        announce(url)
        await server.closing.wait()
        log.info("server shuts down")
    finally:
        await server.close()
        await runner.cleanup()
        (settings.data_dir / "server.json").unlink(missing_ok=True)


def malformed_in_one_line(record: logging.LogRecord) -> bool:
    """What is no HTTP is its sender's fault: a line in the log, no traceback. A filter that lets all records pass."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        record.__dict__["error"] = " ".join(str(error).split())
    return True


def collect_seldom() -> None:
    """What is loaded by now stays for good: the garbage collector, which stops all calls, need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_server_file(data_dir: Path, server_id: str, url: str) -> None:
    """Where programs find this server: <data-dir>/server.json, replaced atomically."""
    path = data_dir / "server.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({"url": url, "pid": os.getpid(), "server_id": server_id}) + "\n")
    os.replace(scratch, path)


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Raises:
    ServeError: the address is taken, or is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror or error}; give an address of this machine") from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)  # from here on another server is refused
        except OSError as error:
            raise ServeError(
                f"port {port} on {host} cannot be taken ({error.strerror}); stop what listens there "
                f"(`swarmtune stop --url http://{host}:{port}` if it is a swarm server) or give another --port"
            ) from error
        yield listener


@contextmanager
def exclusive(data_dir: Path) -> Iterator[None]:
    """Hold the data folder for this process.

    Raises:
        ServeError: another live server has it, or it is not writable.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "lock").open("a")
    except OSError as error:
        raise unusable(data_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(
                f"--data-dir {data_dir}: another server uses it; stop that or give another folder"
            ) from None
        yield
