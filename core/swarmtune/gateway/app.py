"""The HTTP application: control routes, model routes, status page. Built here, served by server_main."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

from swarmtune.gateway.auth import Keyring
from swarmtune.gateway.calls import ModelRoutes
from swarmtune.gateway.control import ControlRoutes

if TYPE_CHECKING:
    from swarmtune.server import SwarmServer

MAX_BODY_BYTES = 64 * 2**20


def create_app(server: SwarmServer, keys: Keyring) -> web.Application:
    """The whole application; serve it with handler_cancellation, so that a hang-up cancels a generation."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    ModelRoutes(server, keys).add_to(app)
    ControlRoutes(server, keys).add_to(app)
    app.router.add_get("/", _page, allow_head=False)
    app.router.add_route("*", "/{rest:.*}", _nothing_here)
    return app


async def _page(request: web.Request) -> web.Response:
    page = resources.files("swarmtune.dashboard").joinpath("index.html").read_bytes()
    return web.Response(body=page, content_type="text/html", charset="utf-8", headers={"Cache-Control": "no-cache"})


async def _nothing_here(request: web.Request) -> web.Response:
    """Clients probe: a plain 404 is the answer they all take well."""
    return web.Response(status=404, text="not found\n")
