"""The recipe worker: a blueprint's own words, filled in and followed, without a model.

`prepare` writes what the supervisor reads; it is repeatable and starts nothing. `react` is the table of failure
classes. A file handed to a run is never changed afterwards; the factor under study is never changed by a retry.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import a3r
from a3r import supervisor as sv
from a3r.blueprint import Blueprint, Process, fill
from a3r.formats import canonical, dump, sha256, to_yaml
from a3r.hosts import Host
from a3r.results import FailureClass
from a3r.worker import Assignment, Failure, GiveUp, PauseArm, Reaction, Retry

PACKAGES = ("torch", "transformers", "verl", "vllm", "ray", "numpy", "pydantic", "openai")
BACKOFF_S, BACKOFF_MAX_S = 2.0, 300.0
EXTERNAL_BACKOFF_S, EXTERNAL_BACKOFF_MAX_S = 30.0, 1800.0


class MissingSecret(RuntimeError):
    """A blueprint names an environment variable that is not set."""


class CheckoutError(RuntimeError):
    """The code a blueprint names cannot be had."""


class RecipeWorker:
    """Prepares attempts and reacts to failures by table."""

    def __init__(self, campaign: Path, root: Path, tick_s: float = 0.25, backoff_s: float = BACKOFF_S) -> None:
        self.campaign = campaign
        self.root = root
        self.tick_s = tick_s
        self.backoff_s = backoff_s

    # -- preparing

    def prepare(self, job: Assignment, change: Mapping[str, str]) -> None:
        """Write `spec.json` and `launch.json`, and put the earlier attempt's curve in place.

        Raises:
            MissingSecret, CheckoutError: nothing was started; the message says what to do.
        """
        secrets_of(job.blueprint)
        code_dir = self.checkout(job.blueprint)
        config = changed_config(job.blueprint.config, change)
        job.attempt_dir.mkdir(parents=True, exist_ok=True)
        job.run_dir.joinpath("ckpt").mkdir(exist_ok=True)
        write_text(job.run_dir / "spec.yaml", to_yaml(dump(job.blueprint) | {"seeds": [job.seed]}))
        write_text(job.attempt_dir / "spec.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
        self._continue_metrics(job)
        launch = self._launch(job, code_dir, config)
        write_text(job.attempt_dir / "launch.json", json.dumps(launch, indent=1, sort_keys=True) + "\n")

    def _continue_metrics(self, job: Assignment) -> None:
        target = job.attempt_dir / job.blueprint.metrics.file
        if job.previous_dir is None or target.exists() or not self.resumes(job):
            return
        earlier = job.previous_dir / job.blueprint.metrics.file
        if earlier.exists():
            whole_lines = earlier.read_bytes().rpartition(b"\n")
            target.write_bytes(whole_lines[0] + whole_lines[1])

    def resumes(self, job: Assignment) -> bool:
        """Whether there is a checkpoint of this run to go on from."""
        checkpoint = job.blueprint.checkpoint
        if checkpoint is None or job.attempt == 1:
            return False
        directory = Path(fill(checkpoint.dir, {"run_dir": str(job.run_dir)}))
        return directory.is_dir() and any(directory.iterdir())

    def _launch(self, job: Assignment, code_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        blueprint = job.blueprint
        checkpoint = blueprint.checkpoint
        checkpoint_dir = checkpoint.dir if checkpoint else "{run_dir}/ckpt"
        values = {
            "python": sys.executable,
            "seed": str(job.seed),
            "spec": str(job.attempt_dir / "spec.json"),
            "attempt_dir": str(job.attempt_dir),
            "run_dir": str(job.run_dir),
            "ckpt": fill(checkpoint_dir, {"run_dir": str(job.run_dir)}),
        } | {f"port:{name}": str(port) for name, port in job.ports.items()}
        resume = [fill(a, values) for a in checkpoint.resume_arg] if checkpoint and self.resumes(job) else []
        metrics = blueprint.metrics
        return {
            "schema": "a3r/launch/v1",
            "campaign": job.campaign,
            "run": job.run,
            "arm": job.arm,
            "blueprint": blueprint.id,
            "seed": job.seed,
            "replicate": job.replicate,
            "attempt": job.attempt,
            "nonce": job.nonce,
            "epoch": job.epoch,
            "queued_at": job.queued_at,
            "locks": [str(slot_lock(job.host, slot)) for slot in job.slots],
            "gpus": blueprint.resources.gpus,
            "processes": [self._process(p, values, job, code_dir, resume) for p in blueprint.start_order()],
            "timeouts": dump(blueprint.timeouts),
            "tick_s": self.tick_s,
            "metrics": {"file": metrics.file, "step_key": metrics.step_key, "eval": metrics.eval},
            "required_metrics": metrics.required,
            "expect_steps": metrics.steps,
            "stop": {
                "nan": None if blueprint.stop.nan == "ignore" else "diverged",
                "above": [dump(a) for a in blueprint.stop.above],
            },
            "asked": dict(config),
            "provenance": self.provenance(job, code_dir, config),
        }

    def _process(
        self, process: Process, values: Mapping[str, str], job: Assignment, code_dir: Path, resume: list[str]
    ) -> dict[str, Any]:
        ready = process.ready and {"http": fill(process.ready.http, values), "within_s": process.ready.within_s}
        return {
            "name": process.name,
            "argv": [fill(a, values) for a in process.argv] + (resume if process.main else []),
            "cwd": str(code_dir),
            "env": environment(job),
            "needs": process.needs,
            "main": process.main,
            "ready": ready,
        }

    def checkout(self, blueprint: Blueprint) -> Path:
        """The directory the processes run in: the working tree, or a worktree of the commit with the patch applied.

        Raises:
            CheckoutError
        """
        code = blueprint.code
        repo = (self.root / code.repo).resolve()
        if not repo.is_dir():
            raise CheckoutError(f"code.repo {code.repo!r}: no such directory under {self.root}; correct the blueprint")
        if not (code.worktree or code.commit or code.patch_sha256):
            return repo
        commit = git(repo, "rev-parse", "--verify", f"{code.commit or 'HEAD'}^{{commit}}")
        tree = self.campaign / "worktrees" / f"{commit[:12]}{'-' + code.patch_sha256[:12] if code.patch_sha256 else ''}"
        if (tree / ".git").exists() and (tree / ".a3r-ready").exists():
            return tree
        if not tree.exists():
            git(repo, "worktree", "prune")
            git(repo, "worktree", "add", "--detach", str(tree), commit)
        if code.patch_sha256:
            apply_patch(tree, self.campaign / "patches" / f"{code.patch_sha256}.diff", code.patch_sha256)
        (tree / ".a3r-ready").touch()
        return tree

    def provenance(self, job: Assignment, code_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        commit, dirty = repository_state(str(code_dir))
        return {
            "commit": commit,
            "dirty": dirty if not job.blueprint.code.patch_sha256 else False,
            "patch_sha256": job.blueprint.code.patch_sha256,
            "config_sha256": sha256(canonical(dict(config))),
            "model_sha256": model_digest(config.get("model"), code_dir),
            "seed": job.seed,
            "versions": package_versions(),
            "gpus": [s for s in job.slots if s.startswith("gpu/")],
            "a3r_version": a3r_version(),
        }

    # -- reacting

    def react(self, failure: Failure) -> Reaction:
        """What follows from a failed attempt."""
        kind, retry = failure.failure_class, failure.blueprint.retry
        earlier = failure.earlier.get(kind, 0)
        if kind is FailureClass.EXTERNAL_DEP and retry.external == "pause_arm":
            wait = min(EXTERNAL_BACKOFF_S * 2**earlier, EXTERNAL_BACKOFF_MAX_S)
            return PauseArm(f"waiting for something outside: {failure.detail}", wait)
        if kind is FailureClass.CONFIG:
            return GiveUp(failure.detail, block_arm=True)
        allowed = retry.times(FailureClass.CODE if kind is FailureClass.UNKNOWN else kind)
        if earlier >= allowed:
            return GiveUp(f"{kind.value}: {earlier + 1} of {allowed + 1} attempts used; {failure.detail}")
        change = retry.oom.change if kind is FailureClass.OOM else {}
        after = 0.0 if kind is FailureClass.LOST else min(self.backoff_s * 2**earlier, BACKOFF_MAX_S)
        return Retry(f"{kind.value}, attempt {earlier + 2} of {allowed + 1}", after, change)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sv.replace_file(path, text)


def slot_lock(host: Host, slot: str) -> Path:
    """The lock of a slot, shared by every study of this user on the host."""
    directory = Path(host.lock_dir or Path(os.environ.get("TMPDIR", "/tmp")) / f"a3r-locks-{os.getuid()}") / host.name
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{slot.replace('/', '-')}.lock"


def is_held(lock: Path) -> bool:
    """Whether a process of any study has the slot of this lock now."""
    with contextlib.suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def environment(job: Assignment) -> dict[str, str]:
    """Variables of a process beyond the leader's own; secrets are not among them, they are never written down."""
    threads = str(job.host.threads)
    gpus = ",".join(s.removeprefix("gpu/") for s in job.slots if s.startswith("gpu/"))
    values = {"PYTHONUNBUFFERED": "1", "A3R_SEED": str(job.seed), "A3R_RUN": job.run, "CUDA_VISIBLE_DEVICES": gpus}
    if not gpus:
        values |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return values | job.blueprint.env.variables


def secrets_of(blueprint: Blueprint) -> dict[str, str]:
    """Values of the secrets a blueprint names.

    Raises:
        MissingSecret
    """
    missing = [name for name in blueprint.env.secrets if not os.environ.get(name)]
    if missing:
        raise MissingSecret(f"environment variable {missing[0]} is not set; export it before `a3r research`")
    return {name: os.environ[name] for name in blueprint.env.secrets}


def changed_config(config: Mapping[str, Any], change: Mapping[str, str]) -> dict[str, Any]:
    """`{"micro_batch": "/2"}` applied; whole numbers stay whole and at least 1."""
    out = dict(config)
    for key, how in change.items():
        value, amount = out[key], float(how[1:])
        scaled = value / amount if how.startswith("/") else value * amount
        out[key] = max(1, int(scaled)) if isinstance(value, int) else scaled
    return out


def git(repo: Path, *argv: str) -> str:
    done = subprocess.run(["git", "-C", str(repo), *argv], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise CheckoutError(f"git {argv[0]} in {repo}: {done.stderr.strip() or 'failed'}")
    return done.stdout.strip()


def apply_patch(tree: Path, patch: Path, digest: str) -> None:
    try:
        text = patch.read_bytes()
    except FileNotFoundError:
        raise CheckoutError(f"{patch}: the patch of this blueprint version is missing; restore it") from None
    if sha256(text) != digest:
        raise CheckoutError(f"{patch}: changed since it was accepted; restore the original bytes")
    git(tree, "checkout", "--", ".")
    git(tree, "apply", str(patch))


@lru_cache(maxsize=16)
def repository_state(directory: str) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it); None, None outside a repository."""
    try:
        commit = git(Path(directory), "rev-parse", "HEAD")
        return commit, bool(git(Path(directory), "status", "--porcelain", "--untracked-files=no"))
    except (CheckoutError, OSError):
        return None, None


def model_digest(model: Any, code_dir: Path) -> str | None:
    """Hash of a model's weights and configuration: of a catalogue name that is on this machine, or a local folder."""
    if not isinstance(model, str):
        return None
    folder = Path(model) if Path(model).is_absolute() else code_dir / model
    if not folder.is_dir():
        from swarmtune.models import Catalogue, ModelError

        try:
            folder = Catalogue().folder(model)
        except ModelError:
            return None
    files = sorted(f for f in folder.glob("*") if f.suffix in (".safetensors", ".json", ".bin") and f.is_file())
    stamps = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    return files_digest(stamps) if stamps else None


@lru_cache(maxsize=8)
def files_digest(stamps: tuple[tuple[str, int, int], ...]) -> str:
    """Hash of files' names and bytes; read again only when size or time of one has changed."""
    total = hashlib.sha256()
    for name, _, _ in stamps:
        with open(name, "rb") as file:
            total.update(f"{Path(name).name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def a3r_version() -> str:
    try:
        return metadata.version("a3r")
    except metadata.PackageNotFoundError:
        return f"source at {Path(a3r.__file__).parent.name}"
