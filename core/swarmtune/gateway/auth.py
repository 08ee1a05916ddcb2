"""Keys of people and programs, by what each may do. Episode keys are another matter: the episode book knows those.

A server without keys lets everyone do everything, and therefore may only listen on this machine (`refuse_open_bind`).
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from enum import StrEnum


class Capability(StrEnum):
    OBSERVE = "observe"
    """Read status, pool, steps, events, episodes."""
    ROLLOUT = "rollout"
    """Claim, end and abort training episodes; register as a client."""
    EVALUATE = "evaluate"
    """Claim, end and abort evaluation episodes."""
    CONTROL = "control"
    """Start, stop, checkpoint, shut down; and all of the above."""


class Unauthorized(Exception):
    """No key, or one this server does not know."""


class Forbidden(Exception):
    """A known key that may not do this."""


class BindRefused(ValueError):
    """The address may not be listened on; the message says what to give."""


def bearer_key(headers: Mapping[str, str]) -> str | None:
    """The key of a request: `Authorization: Bearer` or `x-api-key`."""
    authorization = headers.get("Authorization")
    if authorization and authorization[:7].lower() == "bearer ":
        return authorization[7:].strip() or None
    return headers.get("x-api-key") or None


class Keyring:
    """Looks keys up by their digest, so that no comparison's duration tells anything about a key."""

    def __init__(self, keys: Mapping[str, Iterable[Capability]] | None = None) -> None:
        self._by_digest = {_digest(key): frozenset(capabilities) for key, capabilities in (keys or {}).items()}

    @property
    def is_open(self) -> bool:
        """No keys: everyone may do everything."""
        return not self._by_digest

    def knows(self, key: str) -> bool:
        return _digest(key) in self._by_digest

    def require(self, headers: Mapping[str, str], *any_of: Capability) -> None:
        """Raises:
        Unauthorized: no key or an unknown one.
        Forbidden: the key has none of these capabilities, nor control.
        """
        if self.is_open:
            return
        key = bearer_key(headers)
        if key is None:
            raise Unauthorized("this server wants a key: send `Authorization: Bearer <key>`")
        capabilities = self._by_digest.get(_digest(key))
        if capabilities is None:
            raise Unauthorized("unknown key; ask who runs this server for one")
        if not capabilities.intersection((*any_of, Capability.CONTROL)):
            wanted = " or ".join(any_of)
            raise Forbidden(f"this key may {', '.join(sorted(capabilities))}; {wanted} is needed here")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_open_bind(host: str, *, has_control_key: bool) -> None:
    """Raises:
    BindRefused: others could reach the server and no control key protects it.
    """
    if not has_control_key and not is_loopback(host):
        raise BindRefused(
            f"--host {host} lets other machines in, and there is no control key; set one in an environment variable "
            "and name it with --control-key-env, or listen on 127.0.0.1"
        )
