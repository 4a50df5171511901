"""A download from a hub on loopback, and its progress."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.models.paths import resolve_model
from tandem.runtime.errors import ModelError
from tandem.runtime.process import progress
from tandem.runtime.process.work import Work, on_work

pytest.importorskip("huggingface_hub", reason="the hub is an optional extra")

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 3_000_000, "notes.bin": b"n"}
FILES["consolidated.safetensors"] = FILES["model.safetensors"]


class Hub(BaseHTTPRequestHandler):
    """A repository with FILES at one commit."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in FILES.items()
            ]
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "me/tiny", "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(entries if "/tree/" in path else info).encode())
        else:
            self._send(FILES[path.rsplit("/", 1)[1]])

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import huggingface_hub.constants as constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_download_has_the_progress_of_its_bytes_and_no_other_bar(
    hub: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVENT_INTERVAL_S", 0.0)
    told: list[Work | None] = []
    undo = on_work(told.append)
    folder = resolve_model("me/tiny")
    undo()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    *works, last = told
    assert last is None and works[-1] is not None
    assert works[-1].line.startswith("download of me/tiny: ") and works[-1].share == 1.0
    lines = capfd.readouterr().err.splitlines()  # Tandem's own come every few seconds
    assert all(line.startswith("download of me/tiny: ") for line in lines), lines


@pytest.mark.slow
def test_a_repository_of_gguf_files_is_refused_by_the_model_to_name_instead(
    hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FILES, "config.json")
    monkeypatch.setitem(FILES, "tiny-Q4_K_M.gguf", b"GGUF")
    with pytest.raises(ModelError, match=r"no config\.json .*GGUF.*name the model that they were"):
        resolve_model("me/tiny")
