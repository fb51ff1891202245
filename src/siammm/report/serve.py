"""The page over HTTP, for this machine only.

Other pages that are open in a browser can send requests here too, and so can other users of the machine. So every
address begins with a token, which only the terminal and our page know; a request must name this server as its host
(which stops DNS rebinding), requests from other sites are refused, and a search or a name, which are sent, show the
token in a header too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from siammm.core.errors import InputError, SiamMMError
from siammm.core.text import one_line
from siammm.report.explorer import MOST_AT_ONCE, MOST_BYTES, Explorer, Missing
from siammm.report.render import policy, render
from siammm.report.thumbnails import MEDIA_TYPE

ADDRESS = "127.0.0.1"
TOKEN_HEADER = "X-Siammm-Token"
_JSON, _HTML = "application/json; charset=utf-8", "text/html; charset=utf-8"
_TIMEOUT = 60.0
# Bytes of a request that gives a name, at most: each character may be escaped.
_MOST_OF_A_NAME = 4096
# And of one that gives a selection: the numbers of all images of a page.
_MOST_OF_A_SELECTION = 2**20
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A request that is not answered, and why."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Server(ThreadingHTTPServer):
    """Listens from the start, so that a port in use is refused before the work; answers once it has a page."""

    daemon_threads = True
    # Elsewhere this lets a port go at once; on Windows it would let another program take it over.
    allow_reuse_address = os.name != "nt"
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        if not 0 <= port <= 65535:
            raise InputError(f"--port is {port}, but ports are 0 to 65535; give one of these.")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({one_line(error)})"
            raise InputError(f"Port {port} {why}; give another --port, or 0 for any that is free.") from error
        self.token = secrets.token_urlsafe(24)
        self.explorer: Explorer | None = None
        self.page = b""
        self.naming = threading.Lock()
        """One name at a time, so that the page has all of them."""

    @property
    def url(self) -> str:
        """Where the page is, with the token. What the page asks for is relative to it."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the Host header that are accepted."""
        names = (f"{name}:{self.server_port}" for name in (ADDRESS, "localhost"))
        return frozenset([*names, *([ADDRESS, "localhost"] if self.server_port == 80 else [])])

    @property
    def notes(self) -> list[str]:
        """What a reader of the page should know."""
        return [] if self.explorer is None else self.explorer.gathered.contents["notes"]

    def show(self, explorer: Explorer) -> None:
        """Answer with this from now on."""
        self.page = render(explorer.gathered.contents, token=self.token).encode("utf-8")
        self.explorer = explorer

    def server_bind(self) -> None:
        """Bind without the name lookup of the base class, which may take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is nobody's fault."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "siammm", ""
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        """Answer a question; to HEAD, without the body."""
        self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer a search by picture, or keep a name."""
        self._answer(self._post)

    def _answer(self, find: Callable[[], tuple[str, bytes]]) -> None:
        # A body that is not read, or not yet, would be taken for the next request.
        if self.command == "POST" or "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        try:
            self._check_sender()
            kind, body = find()
            self._send(HTTPStatus.OK, kind, body)
        except Refused as refused:
            self._fail(refused.status, str(refused))
        except Missing as error:
            self._fail(HTTPStatus.NOT_FOUND, str(error))
        except SiamMMError as error:
            self._fail(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except (MemoryError, torch.OutOfMemoryError):
            self._fail(HTTPStatus.INSUFFICIENT_STORAGE, "There is not enough memory for this; give a smaller picture.")

    # -- who asks -----------------------------------------------------------------------------------------------------

    def _check_sender(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN, f"This server answers at {ADDRESS} only.")
        if self._asked() and self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise Refused(HTTPStatus.FORBIDDEN, "Another site asked for this.")
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.server.hosts}:
            raise Refused(HTTPStatus.FORBIDDEN, "Another site asked for this.")

    def _asked(self) -> list[str]:
        """The parts of the path after the token, without which nothing is answered."""
        parts = [part for part in urlsplit(self.path).path.split("/") if part]
        if parts == ["favicon.ico"]:
            return parts  # browsers ask for it by themselves
        if not parts or not secrets.compare_digest(parts[0].encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "Open the whole address that siammm explore printed, with its key.")
        return parts[1:]

    # -- questions ----------------------------------------------------------------------------------------------------

    def _get(self) -> tuple[str, bytes]:
        explorer = self.server.explorer
        address = urlsplit(self.path)
        parts = self._asked()
        if explorer is None:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "The run is still being read; ask again.")
        try:
            given = parse_qs(address.query, keep_blank_values=True, max_num_fields=16, errors="replace")
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "The question has too many parts.") from None
        match parts:
            case []:
                return _HTML, self.server.page
            case ["favicon.ico"]:
                return "image/x-icon", b""
            case ["sheets", index]:
                return MEDIA_TYPE, explorer.sheet(_whole(index))
            case ["thumbnail", position]:
                return MEDIA_TYPE, explorer.thumbnail(_whole(position))
            case ["image", position]:
                data = explorer.image(_whole(position))
                return "image/png" if data.startswith(b"\x89PNG") else "image/jpeg", data
            case ["similar", position]:
                return _JSON, _encoded(explorer.similar(_whole(position)))
            case ["quality"]:
                return _JSON, _encoded(explorer.quality())
            case ["cluster" | "group" as level, index]:
                order = _one(given, "order", "central")
                if order not in ("central", "outlying"):
                    raise Refused(HTTPStatus.BAD_REQUEST, "order is central or outlying.")
                offset, limit = _whole(_one(given, "offset", "0")), _limit(given)
                page = explorer.cluster if level == "cluster" else explorer.group
                return _JSON, _encoded(page(_whole(index), offset, limit, order))
            case ["find"]:
                return _JSON, _encoded(explorer.find(_one(given, "query", ""), _limit(given)))
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, "There is nothing here by that name.")

    def _post(self) -> tuple[str, bytes]:
        explorer = self.server.explorer
        match self._asked():
            case ["search"] if explorer is not None:
                return _JSON, _encoded(explorer.search(self._sent("picture", MOST_BYTES)))
            case ["group", index, "name"] if explorer is not None:
                name = _name(self._sent("name", _MOST_OF_A_NAME))
                with self.server.naming:
                    answer = explorer.name_group(_whole(index), name)
                    self.server.show(explorer)
                return _JSON, _encoded(answer)
            case ["selection"] if explorer is not None:
                given = _object(self._sent("selection", _MOST_OF_A_SELECTION))
                if not isinstance(given.get("name"), str) or not isinstance(given.get("images"), list):
                    raise Refused(HTTPStatus.BAD_REQUEST, 'A selection is sent as {"name": text, "images": numbers}.')
                with self.server.naming:
                    answer = explorer.keep_selection(given["name"], given["images"])
                    self.server.show(explorer)
                return _JSON, _encoded(answer)
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, "There is nothing here by that name.")

    def _sent(self, what: str, most: int) -> bytes:
        """The body of a request, if our page has sent it and it is not too long."""
        if not secrets.compare_digest(self.headers.get(TOKEN_HEADER, "").encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "The page is of an earlier start of this server; load it again.")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,12}", length):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, f"The request does not say how long its {what} is.")
        if int(length) > most:
            size, unit = (2**20, "MB") if most >= 2**20 else (1, "bytes")
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The {what} has {int(length) / size:,.0f} {unit}, but at most {most // size:,} are read; send less.",
            )
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError(f"the {what} ended early")
        return body

    # -- answers ------------------------------------------------------------------------------------------------------

    def _fail(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, _JSON, _encoded({"error": sentence}))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            # Only the page itself may do anything.
            own = policy(live=True) if kind == _HTML else "default-src 'none'"
            self.send_header("Content-Security-Policy", f"{own}; frame-ancestors 'none'")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the user's."""


def _encoded(answer: object) -> bytes:
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode("ascii")


def _name(body: bytes) -> str:
    """The name in the body of a request."""
    given = _object(body)
    if not isinstance(given.get("name"), str):
        raise Refused(HTTPStatus.BAD_REQUEST, 'A name is sent as {"name": text}.')
    return given["name"]


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty one for anything else."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _one(given: dict[str, list[str]], name: str, default: str) -> str:
    return given[name][-1] if name in given else default


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise Refused(HTTPStatus.BAD_REQUEST, "A whole number is needed there.")
    return int(text)


def _limit(given: dict[str, list[str]]) -> int:
    return min(MOST_AT_ONCE, max(1, _whole(_one(given, "limit", "60"))))
