"""Data sets that are not on this machine: a web server, and a small Hub that answers as the real one does."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from made import ids, json_lines, opened, parquet, picture, png, rows_of

from train.config.schema import Data
from train.data.loader import load
from train.data.plan import evaluation_plan
from train.errors import RunError
from train.tasks.image_classification import PictureDecoder

COMMIT = "0123456789abcdef" * 2 + "01234567"
HERE = Path(__file__).parent
SECRET = "hf_thisIsSecret"
OPEN = """
import json, sys
from made import ids, opened
from train.ending import leave
from train.errors import LockstepError
for keys in json.loads(sys.argv[1]):
    try:
        sources = opened(**keys)
        print("ids", ids(sources), sources.sources.identity["revision"])
    except LockstepError as error:
        print(type(error).__name__, error)
leave(0)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The data set org/set of the files in `folder`; org/gated, org/none and revision v9 are refused."""

    folder: Path

    def log_message(self, *_):
        pass

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode() if self.command == "POST" else ""
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        entries = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[1]
        for part, code, kind in (("/gated", 403, "GatedRepo"), ("/none", 401, "RepoNotFound"), ("/v9", 404, "RevisionNotFound")):
            if part in path:
                return self.answer(code, b"{}", X_Error_Code=kind)
        if "/resolve/" in path and name in files:
            first, last = 0, len(files[name]) - 1
            if span := self.headers.get("Range"):
                first, last = (int(end) for end in span.removeprefix("bytes=").split("-"))
            body = files[name][first : last + 1]
            extent = {"Content_Range": f"bytes {first}-{first + len(body) - 1}/{len(files[name])}"} if span else {}
            tag = hashlib.sha256(files[name]).hexdigest()
            return self.answer(206 if span else 200, body, ETag=f'"{tag}"', X_Repo_Commit=COMMIT, **extent)
        if "/tree/" in path:
            return self.answer(200, json.dumps(entries).encode())
        if "/paths-info/" in path:
            return self.answer(200, json.dumps([entry for entry in entries if entry["path"] in asked]).encode())
        if path.startswith("/api/datasets/"):
            return self.answer(200, json.dumps({"id": "org/set", "sha": COMMIT, "siblings": [], "tags": []}).encode())
        return self.answer(404, b"{}", X_Error_Code="EntryNotFound")

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        self.do_GET()


@contextmanager
def serving(handler):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def opened_elsewhere(home, environment, *sets):
    """A line for each data set, `ids` or the error, from a process of this environment, which the Hub's client reads once."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", OPEN, json.dumps(sets)],
        env={**bare, "HF_HOME": str(home), "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", **environment},
        capture_output=True, text=True, check=True, timeout=100,
    ).stdout.splitlines()  # fmt: skip


def test_a_data_set_of_the_hub_opens_at_a_commit_and_each_refusal_has_its_own_words(tmp_path):
    parquet(tmp_path / "hub/train.parquet", ["cat", "dog", "cat"], row_group_size=2)
    with serving(type("OneHub", (Hub,), {"folder": tmp_path / "hub"})) as address:
        streamed, prepared, none, gated, revision, subset = opened_elsewhere(
            tmp_path / "home",
            {"HF_ENDPOINT": address, "HF_TOKEN": SECRET},
            {"path": "org/set"},
            {"path": "org/set", "streaming": False},
            {"path": "org/none"},
            {"path": "org/gated"},
            {"path": "org/set", "revision": "v9"},
            {"path": "org/set", "subset": "tiny"},
        )
    assert streamed == prepared == f"ids [0, 1, 0] {COMMIT}"
    assert "does not exist or is private (a token was sent): check the name, or set HF_TOKEN" in none
    assert "is gated (a token was sent): ask for access on its page" in gated
    assert "UsageError data.revision: the data set org/set on the Hugging Face Hub has no revision 'v9'" in revision
    assert "UsageError data.subset: BuilderConfig 'tiny' not found. Available: ['default']" in subset
    assert not any(SECRET in line for line in (none, gated, revision, subset))


@pytest.mark.parametrize("flag", ["HF_HUB_OFFLINE", pytest.param("HF_DATASETS_OFFLINE", marks=pytest.mark.slow)])
def test_offline_a_name_of_the_hub_is_told_with_the_flag_and_local_data_opens(tmp_path, flag):
    path = str(parquet(tmp_path / "set/a.parquet", [0, 1]).parent)
    refused, *local = opened_elsewhere(
        tmp_path / "home", {flag: "1"}, {"path": "some/data"}, {"path": path}, {"path": path, "streaming": False}
    )
    assert f"some/data is no file or folder here ({Path('some/data').absolute()})" in refused
    assert f"is switched off by {flag}" in refused
    assert local == ["ids [0, 1] None"] * 2


@pytest.mark.slow
def test_without_network_a_name_of_the_hub_fails_within_a_minute(tmp_path):
    start = time.monotonic()
    (refused,) = opened_elsewhere(tmp_path / "home", {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"path": "some/data"})
    assert "some/data is no file or folder here" in refused
    assert "the Hugging Face Hub cannot be reached" in refused
    assert time.monotonic() - start < 60


def test_local_data_asks_no_network(tmp_path):
    asked = []

    class Proxy(Hub):
        def do_GET(self):
            asked.append(self.path)
            self.answer(404)

        def do_CONNECT(self):
            self.do_GET()

    rows = [{"image": "a", "label": row} for row in range(2)]
    arrow = tmp_path / "arrow/a.arrow"
    arrow.parent.mkdir()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(arrow, table.schema) as file:
        file.write(table)
    lines = json_lines(tmp_path / "lines/a.jsonl", rows)
    table = tmp_path / "table/a.csv"
    table.parent.mkdir()
    table.write_text("image,label\na,0\na,1\n")
    files = (lines, arrow, table, parquet(tmp_path / "parquet/a.parquet", [0, 1]))
    sets = [{"path": str(path)} for file in files for path in (file, file.parent)]
    with serving(Proxy) as address:
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
        assert opened_elsewhere(tmp_path / "home", proxies, *sets) == ["ids [0, 1] None"] * 8
    assert asked == []


@pytest.fixture
def web(tmp_path):
    (tmp_path / "web").mkdir()

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "web"))

        def log_message(self, *_):
            pass

    with serving(Files) as address:
        yield address


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_file_on_a_web_server_opens(tmp_path, web, name):
    parquet(tmp_path / "web/a.parquet", ["cat", "dog"])
    json_lines(tmp_path / "web/a.jsonl", [{"image": "a", "label": label} for label in ("cat", "dog")])
    for streaming in (True, False):
        sources = opened(f"{web}/{name}?download=true", streaming=streaming)
        assert ids(sources) == [0, 1]
        assert sources.train.where(1) == f"{name} row 1"


def test_a_file_on_a_web_server_is_downloaded_again_only_when_it_changes(tmp_path, web):
    path = json_lines(tmp_path / "web/a.jsonl", [{"image": "a", "label": label} for label in ("cat", "dog")])
    os.utime(path, (1e9, 1e9))
    assert ids(opened(f"{web}/a.jsonl")) == [0, 1]
    kept = next((tmp_path / "cache of datasets").rglob("a.jsonl"))
    before = kept.stat().st_mtime_ns
    assert ids(opened(f"{web}/a.jsonl")) == [0, 1]
    assert kept.stat().st_mtime_ns == before
    json_lines(path, [{"image": "a", "label": label} for label in ("dog", "cat")])
    assert ids(opened(f"{web}/a.jsonl")) == [1, 0]


def test_what_a_web_server_lacks_is_told_and_so_is_a_server_that_is_not_there(web):
    with pytest.raises(RunError, match=r"/nope.csv: the server answers 404"):
        opened(f"{web}/nope.csv")
    with pytest.raises(RunError, match=r"http://127.0.0.1:9/a.csv: cannot be downloaded: .*[Rr]efused"):
        opened("http://127.0.0.1:9/a.csv")


def test_a_picture_that_a_web_server_lacks_is_one_bad_sample_and_none_of_a_cache(tmp_path, web):
    picture(tmp_path / "web/0.png", 7)
    rows = [{"image": f"{web}/{name}.png", "label": name} for name in (0, 1)]
    path = json_lines(tmp_path / "a.jsonl", rows)
    sources = opened(path)
    decoder = PictureDecoder(Data(path=str(path)), sources.labels, 0, training=False)
    plan = partial(evaluation_plan, sources.train, 2, 0, 1)
    [batch] = load(sources.train, decoder, plan, workers=0, prefetch=1, pin_memory=False)
    assert batch.keys == [0], batch.bad
    assert batch.fields["image"].eq(7).all()
    assert [(bad.where, bad.reason) for bad in batch.bad] == [("a.jsonl row 1", f"{web}/1.png cannot be fetched")]
    with pytest.raises(RunError, match=r"a.jsonl row 1: http://.*/1.png cannot be fetched. Mend .* data.streaming=true"):
        opened(path, streaming=False)
    picture(tmp_path / "web/1.png", 8)
    assert [row["image"]["bytes"] for _, row in rows_of(opened(path, streaming=False).train)] == [png(7), png(8)]


def test_a_download_that_breaks_off_is_not_taken_for_the_file(tmp_path):
    class Broken(Hub):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"image,label\na,0\nb,1\n")

    with serving(Broken) as address, pytest.raises(RunError, match=r"broke off after 20 of 1000 bytes"):
        opened(f"{address}/a.csv")
    assert not list((tmp_path / "cache of datasets").rglob("a.csv"))
