"""``siammm explore`` over real sockets: what it answers, whom it refuses, and how fast it is."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from siammm.core.errors import InputError
from siammm.report.explorer import MOST_BYTES, Explorer
from siammm.report.gather import GatherSettings, gather
from siammm.report.serve import Server
from siammm.runs import files as run_files
from tests.data.image_sets import encoded, write_npz
from tests.report.made_runs import check_contents, made_run, opened, small_set, trained_run


class Client:
    """Asks a server, as its own page would."""

    def __init__(self, server: Server) -> None:
        self.port, self.token, self.server = server.server_port, server.token, server

    def ask(
        self, path: str, *, method: str = "GET", body: Any = None, key: str | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        path = f"/{self.token}{path}" if key is None else f"{key}{path}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, body, headers = self.ask(path)
        assert status == 200, body
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        return json.loads(body)

    def name(self, group: object, name: object) -> tuple[int, Any]:
        body = json.dumps({"name": name})
        status, body, _ = self.ask(f"/group/{group}/name", method="POST", body=body, X_Siammm_Token=self.token)
        return status, json.loads(body)

    def search(self, file: bytes) -> tuple[int, Any]:
        status, body, _ = self.ask("/search", method="POST", body=file, X_Siammm_Token=self.token)
        return status, json.loads(body)


def serving(folder: Path) -> Iterator[Client]:
    run = opened(folder)
    gathered = gather(run, GatherSettings(live=True))
    check_contents(gathered.contents, run)
    with Server(0) as server:
        server.show(Explorer(run, gathered))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    return trained_run(folder, write_npz(folder, small_set(folder)))


@pytest.fixture(scope="module")
def client(trained: Path) -> Iterator[Client]:
    yield from serving(trained)


# -- answers


def test_the_page(client: Client) -> None:
    status, body, headers = client.ask("/")
    assert status == 200
    text = body.decode()
    assert re.search(r'<meta name="token" content="([^"]+)">', text).group(1) == client.token  # pyright: ignore[reportOptionalMemberAccess]
    contents = json.loads(re.search(r'id="contents">(.*?)</script>', text, re.DOTALL).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    assert contents["live"] is True
    assert [sheet["url"] for sheet in contents["thumbnails"]["sheets"]] == ["sheets/0"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "Python" not in headers["Server"]
    assert "Access-Control-Allow-Origin" not in headers


def test_sheets_and_thumbnails(client: Client) -> None:
    images = small_set(Path(), 80).images
    status, body, headers = client.ask("/sheets/0")
    assert (status, headers["Content-Type"]) == (200, "image/webp")
    sheet = np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))
    explorer = client.server.explorer
    assert explorer is not None
    first = int(explorer.gathered.image_M[0])
    np.testing.assert_array_equal(sheet[:32:4, :32:4], images[first])
    for position in (0, 79):
        status, body, _ = client.ask(f"/thumbnail/{position}")
        assert status == 200
        np.testing.assert_array_equal(
            np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))[::4, ::4], images[position]
        )
    for path in ("/sheets/1", "/thumbnail/80"):
        status, body, _ = client.ask(path)
        assert status == 404
        assert "There is no" in json.loads(body)["error"]


def test_pages_of_a_cluster(client: Client) -> None:
    explorer = client.server.explorer
    assert explorer is not None
    found, cosine_N = explorer.run, explorer.gathered.measured.cosine_N
    k = int(found.cluster_N[0])
    inside = np.flatnonzero(found.cluster_N == k)
    whole = client.json(f"/cluster/{k}?limit=500")
    assert whole["total"] == len(inside) == len(whole["images"])
    assert {image["position"] for image in whole["images"]} == set(inside.tolist())
    similarities = [image["similarity"] for image in whole["images"]]
    assert similarities == sorted(similarities, reverse=True)
    for image in whole["images"]:
        i = image["position"]
        assert (image["id"], image["cluster"], image["label"]) == (found.ids[i], k, int(found.label_N[i]))
        assert image["similarity"] == pytest.approx(float(cosine_N[i]), abs=1e-3)
    own = client.json(f"/group/{k}?limit=500")
    assert own == whole, "without groups every cluster is its own"
    part = client.json(f"/cluster/{k}?offset=2&limit=3&order=central")
    assert part["images"] == whole["images"][2:5]
    outlying = client.json(f"/cluster/{k}?order=outlying&limit=500")["images"]
    scores = [float(found.outlier_N[image["position"]]) for image in outlying]
    assert scores == sorted(scores, reverse=True)
    assert client.json(f"/cluster/{k}?offset=100000")["images"] == []


def test_names_are_found(client: Client) -> None:
    found = client.json("/find?query=7&limit=4")
    expected = [str(i) for i in range(80) if "7" in str(i)]
    assert found["total"] == len(expected)
    assert [image["id"] for image in found["images"]] == expected[:4]
    assert client.json("/find?query=" + quote("</script>é"))["total"] == 0
    assert client.json("/find")["total"] == 80


def test_search_by_picture(client: Client, trained: Path) -> None:
    """An image of the run finds itself, and its own cluster."""
    images = small_set(Path(), 80).images
    embedding_ND = np.load(trained / run_files.EMBEDDINGS).astype(np.float64)
    explorer = client.server.explorer
    assert explorer is not None
    for i in (0, 33, 79):
        status, answer = client.search(encoded(images[i]))
        assert status == 200
        first = answer["neighbours"][0]
        assert first["similarity"] == pytest.approx(1, abs=2e-3)
        cosine_N = embedding_ND @ embedding_ND[i]
        assert cosine_N[first["position"]] > 0.998
        assert len(answer["neighbours"]) == 48
        for neighbour in answer["neighbours"]:
            assert neighbour["similarity"] == pytest.approx(cosine_N[neighbour["position"]], abs=4e-3)
        assert answer["clusters"][0][0] == int(explorer.run.cluster_N[i])
        assert answer["clusters"][0][1] == pytest.approx(float(explorer.run.probability_N[i]), abs=0.02)
        assert sum(share for _, share in answer["clusters"]) == pytest.approx(1, abs=1e-2)
        assert answer["outlier_score"] == pytest.approx(float(explorer.run.outlier_N[i]), abs=0.05)


def test_pictures_of_any_kind(client: Client) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (300, 200, 3), dtype=np.uint8)
    for form in ("JPEG", "WEBP", "GIF", "PNG"):
        status, answer = client.search(encoded(picture, form))
        assert status == 200
        assert 0 <= answer["outlier_score"] <= 1


def test_what_is_no_picture(client: Client) -> None:
    for file, message in ((b"", "is empty"), (b"<svg onload=alert(1)>", "is not an image"), (b"\x89PNG\r\n\x1a\n", "")):
        status, answer = client.search(file)
        assert status == 422
        assert answer["error"].startswith("The picture ")
        assert message in answer["error"]
    bomb = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(bomb, "PNG")
    status, answer = client.search(bomb.getvalue())
    assert status == 422
    assert "more than the limit" in answer["error"]


def test_head_and_one_connection_for_many(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    for method in ("GET", "HEAD", "GET"):
        connection.request(method, f"/{client.token}/find?query=1")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200
        assert (len(body) == 0) == (method == "HEAD")
        assert int(answer.headers["Content-Length"]) > 0
    connection.close()


# -- names of groups


def contents_of(client: Client) -> Any:
    text = client.ask("/")[1].decode()
    return json.loads(re.search(r'id="contents">(.*?)</script>', text, re.DOTALL).group(1))  # pyright: ignore[reportOptionalMemberAccess]


@pytest.fixture
def grouped(tmp_path: Path) -> Iterator[Client]:
    yield from serving(made_run(tmp_path, n=60, groups=[0, 1, 0, 1, 1]))


def test_a_group_is_named(grouped: Client, tmp_path: Path) -> None:
    names = tmp_path / "made" / run_files.GROUP_NAMES
    assert grouped.name(1, "  <b>birds</b>\n") == (200, {"name": "<b>birds</b>"})
    assert [group["name"] for group in contents_of(grouped)["groups"]] == ["", "<b>birds</b>"]
    assert json.loads(names.read_text())["names"] == {"1": "<b>birds</b>"}
    assert [group["name"] for group in gather(opened(tmp_path / "made"), GatherSettings()).contents["groups"]] == [
        "",
        "<b>birds</b>",
    ]
    assert grouped.name(1, "") == (200, {"name": ""})
    assert json.loads(names.read_text())["names"] == {}
    assert [group["name"] for group in contents_of(grouped)["groups"]] == ["", ""]


def test_a_name_needs_the_token_and_the_key(grouped: Client, tmp_path: Path) -> None:
    body = json.dumps({"name": "x"})
    for headers in ({}, {"X_Siammm_Token": "x"}, {"X_Siammm_Token": "é"}):
        assert grouped.ask("/group/0/name", method="POST", body=body, **headers)[0] == 403
    own = {"X_Siammm_Token": grouped.token}
    assert grouped.ask("/group/0/name", method="POST", body=body, key="/x", **own)[0] == 403
    assert grouped.ask("/group/0/name", method="POST", body=body, Origin="http://evil.example", **own)[0] == 403
    assert grouped.ask("/group/0/name", method="POST", body=body, Sec_Fetch_Site="cross-site", **own)[0] == 403
    assert grouped.ask("/group/0/name", method="POST", body=body, Host="evil.example", **own)[0] == 403
    assert grouped.ask("/group/0/name", **own)[0] == 404, "a link cannot name anything"
    assert not (tmp_path / "made" / run_files.GROUP_NAMES).exists()


@pytest.mark.parametrize(
    ("group", "name", "status", "message"),
    [
        (2, "x", 404, "There is no group 2; they are 0 to 1."),
        ("-1", "x", 400, "A whole number is needed there."),
        (0, "x" * 101, 422, "The name has 101 characters, but at most 100 are kept; shorten it."),
        (0, "x" * 5000, 413, "The name has 5,012 bytes, but at most 4,096 are read; send less."),
        (0, None, 400, 'A name is sent as {"name": text}.'),
        (0, ["x"], 400, 'A name is sent as {"name": text}.'),
    ],
)
def test_a_name_that_is_refused(group: object, name: object, status: int, message: str, grouped: Client) -> None:
    assert grouped.name(group, name) == (status, {"error": message})
    assert [one["name"] for one in contents_of(grouped)["groups"]] == ["", ""]


@pytest.mark.parametrize("body", [b"", b"x", b"[]", b"\xff", b"[" * 4000, b"null"])
def test_a_name_that_is_no_json(body: bytes, grouped: Client) -> None:
    answer = grouped.ask("/group/0/name", method="POST", body=body, X_Siammm_Token=grouped.token)
    assert answer[0] == 400
    assert json.loads(answer[1])["error"] == 'A name is sent as {"name": text}.'


def test_many_names_at_once(tmp_path: Path) -> None:
    for client in serving(made_run(tmp_path, n=60, k=9, groups=[*range(8), 0])):
        threads = [threading.Thread(target=client.name, args=(g, f"name {g}")) for g in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [group["name"] for group in contents_of(client)["groups"]] == [f"name {g}" for g in range(8)]


# -- refusals


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "", "[::1]:{port}"]
)
def test_a_name_that_was_made_to_point_here(host: str, client: Client) -> None:
    for method, path in (("GET", "/"), ("GET", "/thumbnail/0"), ("POST", "/search")):
        status, body, _ = client.ask(path, method=method, Host=host.format(port=client.port))
        assert status == 403
        assert b"contents" not in body


def test_this_machine_by_name(client: Client) -> None:
    assert client.ask("/", Host=f"localhost:{client.port}")[0] == 200


def test_other_sites_get_nothing(client: Client) -> None:
    for path in ("/find", "/thumbnail/0", "/sheets/0", "/cluster/0"):
        assert client.ask(path, Sec_Fetch_Site="cross-site")[0] == 403
        assert client.ask(path, Sec_Fetch_Site="same-site")[0] == 403
        assert client.ask(path, Origin="http://evil.example")[0] == 403
        assert client.ask(path, Sec_Fetch_Site="same-origin", Origin=f"http://127.0.0.1:{client.port}")[0] == 200
    assert client.ask("/", Sec_Fetch_Site="cross-site")[0] == 200, "a link may lead to the page"


def test_a_search_needs_the_token(client: Client) -> None:
    picture = encoded(small_set(Path(), 80).images[0])
    for headers in ({}, {"X_Siammm_Token": "x"}, {"X_Siammm_Token": "é"}):
        status, body, _ = client.ask("/search", method="POST", body=picture, **headers)
        assert status == 403
        assert "load it again" in json.loads(body)["error"]
    headers = {"X_Siammm_Token": client.token, "Origin": "http://evil.example"}
    assert client.ask("/search", method="POST", body=picture, **headers)[0] == 403
    assert client.ask("/", method="POST", body=picture, X_Siammm_Token=client.token)[0] == 404


@pytest.mark.parametrize("key", ["", "/x", "/%00"])
def test_every_question_needs_the_key(key: str, client: Client) -> None:
    for path in ("/", "/find", "/thumbnail/0", "/sheets/0", "/cluster/0"):
        status, body, _ = client.ask(path, key=key)
        assert status == 403
        assert "with its key" in json.loads(body)["error"]
    assert client.ask("/search", key=key, method="POST", body=b"x", X_Siammm_Token=client.token)[0] == 403


def test_a_picture_that_is_too_large(client: Client) -> None:
    headers = {"Content_Length": str(MOST_BYTES + 1), "X_Siammm_Token": client.token}
    status, body, _ = client.ask("/search", method="POST", **headers)
    assert status == 413
    assert "at most 32 are read" in json.loads(body)["error"]
    for length in ("-1", "x", "1e3"):
        headers = {"Content_Length": length, "X_Siammm_Token": client.token}
        assert client.ask("/search", method="POST", **headers)[0] == 411


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/sheets/x",
        "/sheets/-1",
        "/sheets/0/1",
        "/thumbnail/99999999999999999999",
        "/thumbnail/1e1",
        "/cluster/999",
        "/group/999",
        "/group/0?order=wild",
        "/cluster/0?order=wild",
        "/cluster/0?offset=-1",
        "/find?limit=x",
        "/find?" + "&".join(f"a{i}=1" for i in range(40)),
    ],
)
def test_nonsense_is_refused_in_a_sentence(path: str, client: Client) -> None:
    status, body, headers = client.ask(path)
    assert status in (400, 404)
    assert json.loads(body)["error"].endswith(".")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_what_follows_a_question_is_no_question(client: Client) -> None:
    """A body that nobody asked for is not taken for the next request."""
    find, host = f"GET /{client.token}/find?query", f"HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
    second = f"{find}=hidden {host}\r\n"
    first = f"{find}=a {host}Content-Length: {len(second)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as sender:
        sender.sendall((first + second).encode())
        answer = b"".join(iter(lambda: sender.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_browser_that_goes_away(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    post = f"POST /{client.token}/search HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
    for message in (b"", b"GET / HTTP/1.1\r\nHost: 127", f"{post}"
                    f"X-Siammm-Token: {client.token}\r\nContent-Length: 100\r\n\r\nxx".encode()):  # fmt: skip
        with socket.create_connection(("127.0.0.1", client.port)) as gone:
            gone.sendall(message)
    time.sleep(0.1)
    assert client.ask("/find")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_it_listens_to_this_machine_alone(client: Client) -> None:
    assert client.server.socket.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken(client: Client) -> None:
    with pytest.raises(InputError, match=rf"Port {client.port} is in use; give another --port, or 0"):
        Server(client.port)
    with pytest.raises(InputError, match="--port is 70000, but ports are 0 to 65535"):
        Server(70_000)


def test_many_at_once(client: Client) -> None:
    picture = encoded(small_set(Path(), 80).images[5])
    found: list[int] = []

    def ask(number: int) -> None:
        found.append(client.search(picture)[0] if number % 4 == 0 else client.ask(f"/thumbnail/{number}")[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 24


def test_a_run_whose_images_are_gone(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60)
    (tmp_path / "made-images.npy").unlink()
    for client in serving(folder):
        assert client.ask("/")[0] == 200
        assert client.ask("/sheets/0")[0] == 404
        assert client.ask("/thumbnail/0")[0] == 404
        assert client.json("/cluster/0")["images"]
        assert client.search(encoded(np.zeros((8, 8, 3), np.uint8)))[0] == 200


@pytest.mark.slow
def test_a_hundred_thousand_images_are_answered_in_time(tmp_path: Path) -> None:
    pixels = np.zeros((100_000, 32, 32, 3), np.uint8)
    pixels[..., 0] = np.arange(100_000)[:, None, None] % 251
    folder = made_run(tmp_path, n=100_000, k=100, d=256, size=32, pixels=pixels)
    for client in serving(folder):
        picture = encoded(pixels[7])
        client.search(picture)  # the first loads what the others find
        for path in ("/cluster/3?offset=500&limit=60", "/find?query=999", "/thumbnail/54321", "/sheets/1", "/search"):
            times = []
            for _ in range(5):
                started = time.perf_counter()
                assert (client.search(picture) if path == "/search" else client.ask(path))[0] == 200
                times.append(time.perf_counter() - started)
            assert min(times) < 0.2, path
