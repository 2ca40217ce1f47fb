"""The command `quadriga dash [outputs]`: runs as a page in the browser, live; or as one file to send to a colleague."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from quadriga.errors import ConfigError

PORT = 8020
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: Sequence[str]) -> int:
    """Runs the command until Ctrl-C; raises one of Quadriga's errors where it cannot."""
    options = command_parser().parse_args(argv)
    roots = [Path(root).expanduser() for root in options.roots]
    if options.export:
        from quadriga.dashboard.export import export_page

        page = export_page(roots, Path(options.export).expanduser())
        print(f"{page.path}: {page.runs} runs in {page.path.stat().st_size / 2**20:.1f} MiB; open it in any browser")
        for text in page.left_out:
            print(f"it holds {text}" if not text.startswith("and so") else text)
        return 0
    import uvicorn

    from quadriga.dashboard.server import make_app

    is_local = options.host in LOOPBACK
    token = "" if is_local else secrets.token_urlsafe(18)
    listener = _listener(options.host, options.port)
    host, port = listener.getsockname()[:2]
    shown = "localhost" if is_local else socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{shown}]" if ":" in shown else shown
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    print(f"runs in {', '.join(map(str, roots))}: {address}   (Ctrl-C ends it)", flush=True)
    if not is_local:
        print("whoever has this address can read the runs; it is not encrypted", flush=True)
    app = make_app(roots, [*LOOPBACK, "[::1]"] if is_local else None, token)
    if not options.no_browser:
        threading.Timer(0.3, webbrowser.open, [address]).start()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def _listener(host: str, port: int | None) -> socket.socket:
    """A socket on the port asked for; without one, on the usual port, or where that is taken, on any."""
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is no port", "give a number from 1 to 65535, or 0 for a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: Exception | None = None
    for candidate in (PORT, 0) if port is None else (port,):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)  # whoever comes before the server is up waits, and is not turned away
            return listener
        except (OSError, UnicodeError) as error:  # the port is taken, or there is no such host
            listener.close()
            problem = error
    raise ConfigError(f"cannot listen on {host}:{port or PORT}: {problem}", "choose another --host or --port")


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga dash",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Look at runs in the browser: curves, samples, time, configuration, alarms; live and across runs. "
        "Read-only, and nothing leaves this machine.",
        epilog="""examples:
  quadriga dash
  quadriga dash ~/runs /mnt/cluster/outputs --no-browser
  quadriga dash outputs/quadriga/my_run --export my_run.html
  quadriga dash --host 0.0.0.0                 # for other machines too; the address then has a token""",
    )
    parser.add_argument("roots", nargs="*", default=["outputs"], help="folders with runs, or runs (outputs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, help=f"port ({PORT}, or a free one)")
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    parser.add_argument("--export", metavar="FILE.html", help="write one self-contained page instead, and end")
    return parser
