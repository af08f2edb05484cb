"""`turbogr serve`: answer requests for recommendations over HTTP from an export."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from turbogr.errors import UserError

_GRACE_SECONDS = 30
_BACKLOG = 2048


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="answer requests for recommendations over HTTP",
        description="Serve an export: POST /recommend and /similar, GET /health, /metrics and /openapi.json, and a "
        "page to try it in a browser. An export that replaces the folder is served within seconds, without a lost "
        "request. "
        "SIGTERM and Ctrl-C answer what was asked, then end; SIGHUP looks for a new export at once.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="an export, as written by `turbogr export`")
    parser.add_argument(
        "--host", metavar="NAME", default="127.0.0.1", help="address (default: %(default)s, this machine)"
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--search",
        choices=["auto", "exact", "hnsw"],
        default="auto",
        help="auto: the index in catalogues that are large (default: %(default)s)",
    )
    parser.add_argument("--threads", metavar="N", type=int, help="threads of the user model (default: all cores)")
    parser.add_argument(
        "--reload-seconds", metavar="S", type=float, default=2.0, help="how often to look for a new export (default: 2)"
    )
    parser.add_argument(
        "--max-k", metavar="N", type=int, default=1000, help="most items per list (default: %(default)s)"
    )
    parser.add_argument(
        "--max-histories", metavar="N", type=int, default=64, help="most histories per request (default: %(default)s)"
    )
    parser.add_argument(
        "--max-events", metavar="N", type=int, default=10_000, help="most events per history (default: %(default)s)"
    )
    parser.add_argument(
        "--max-waiting", metavar="N", type=int, default=1024, help="most requests that wait (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    for name in ("threads", "reload_seconds", "max_k", "max_histories", "max_events", "max_waiting"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give more than 0")
    try:
        import uvicorn

        from turbogr.serving.service import Service
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: pip install 'turbogr[serve]'") from None
    from turbogr.serving.live_export import LiveExport
    from turbogr.serving.request_body import Limits

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    listening = _listen(args.host, args.port)
    with listening:
        live = LiveExport(args.folder, search=args.search, threads=args.threads)
        limits = Limits(histories=args.max_histories, events=args.max_events, k=args.max_k)
        service = Service(live, limits=limits, reload_seconds=args.reload_seconds, most_waiting=args.max_waiting)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: service.ask_for_reload())
        config = uvicorn.Config(
            service.app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS, lifespan="on"
        )
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        label, items = live.current.facts["delivered"]["label"], live.current.num_items
        print(
            f"serving {label} of {items:,} items at http://{shown}:{port} (search: {live.current.search})", flush=True
        )
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before anything else is done.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen at {host}:{port}: {error}; choose another --port or --host") from None
    return found
