"""Downloads from folders and from a web server, with what goes wrong on the way."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.models.download import NAME, WORK, download, read_receipt
from services.models.source import ModelError, RemoteFile, Source
from tests.integration.models.hub import COMMIT, TOKEN, Hub

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model-00001-of-00002.safetensors": os.urandom(300_000),
    "model-00002-of-00002.safetensors": os.urandom(200_000),
    "pytorch_model.bin": b"the same in another form",
}
WANTED = {name: content for name, content in FILES.items() if name != "pytorch_model.bin"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of a model."""
    folder = tmp_path / "there"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def checksums(folder: Path) -> None:
    """Write the list of checksums of the wanted files, as sha256sum does."""
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in WANTED]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture
def website(model: Path) -> Iterator[str]:
    """Address of a web server with the model's folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(model)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != NAME}


def silent(_line: str) -> None:
    pass


class Broken(Source):
    """A source whose files break off after some bytes, until it is well again."""

    failures = 0

    def open(self, path: str, offset: int):  # type: ignore[no-untyped-def]
        file = super().open(path, offset)
        if self.failures and path.endswith("1-of-00002.safetensors"):
            self.failures -= 1
            parts = iter([file.read(10_000), OSError("the line is dead")])
            file.read = lambda _size=-1: _next(parts)  # type: ignore[method-assign]
        return file


def _next(parts):  # type: ignore[no-untyped-def]
    part = next(parts)
    if isinstance(part, Exception):
        raise part
    return part


def test_a_model_comes_from_a_folder_and_is_not_fetched_again(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    here = tmp_path / "here"
    receipt = download(Source(f"file://{model}"), here, lines.append)
    assert content(here) == WANTED
    assert receipt.sizes == {name: len(each) for name, each in WANTED.items()}
    assert "has no checksums" in lines[0]
    assert lines[-1].endswith("3 of 3 files")
    (model / "config.json").unlink()
    download(Source(f"file://{model}"), here, lines.append)
    assert lines[-1].endswith("already")
    assert not (here / WORK).exists()


def test_a_web_server_says_by_its_checksums_which_files_there_are(
    model: Path, website: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="has no SHA256SUMS"):
        download(Source(website), tmp_path / "here", silent)
    checksums(model)
    download(Source(website), tmp_path / "here", silent)
    assert content(tmp_path / "here") == WANTED


def test_what_has_other_content_than_its_checksum_never_becomes_part_of_the_model(
    model: Path, website: str, tmp_path: Path
) -> None:
    checksums(model)
    wrong = model / "model-00002-of-00002.safetensors"
    wrong.write_bytes(b"x" * len(FILES[wrong.name]))
    waits: list[float] = []
    with pytest.raises(
        ModelError, match=r"model-00002-of-00002\.safetensors: does not have the sha256 checksum"
    ):
        download(Source(website), tmp_path / "here", silent, pause=waits.append)
    assert len(waits) == 4
    # Without its configuration the folder is no model for anybody.
    assert not {"config.json", wrong.name, NAME} & {path.name for path in (tmp_path / "here").iterdir()}
    wrong.write_bytes(FILES[wrong.name])
    download(Source(website), tmp_path / "here", silent)
    assert content(tmp_path / "here") == WANTED


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_a_line_that_breaks_costs_no_more_than_what_was_lost(
    model: Path, website: str, tmp_path: Path, scheme: str
) -> None:
    checksums(model)
    source = Broken(website if scheme == "http" else f"file://{model}")
    source.failures = 2
    waits: list[float] = []
    lines: list[str] = []
    download(source, tmp_path / "here", lines.append, pause=waits.append)
    assert content(tmp_path / "here") == WANTED
    assert len(waits) == 2
    source = Broken(source.address)
    source.failures = 5
    with pytest.raises(ModelError, match="the line is dead"):
        download(source, tmp_path / "again", silent, pause=waits.append)
    part = tmp_path / "again" / WORK / "model-00001-of-00002.safetensors.part"
    assert part.stat().st_size > 0
    download(Source(source.address), tmp_path / "again", silent)
    assert content(tmp_path / "again") == WANTED


def test_a_folder_with_another_model_is_left_alone(model: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    download(Source(f"file://{model}"), here, silent)
    before = content(here)
    (model / "more").mkdir()
    (model / "more/config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"give .* another folder"):
        download(Source(f"file://{model}/more"), here, silent)
    assert content(here) == before


def test_a_disk_without_room_is_told_before_anything_comes(model: Path, tmp_path: Path) -> None:
    class Huge(Source):
        def files(self) -> list[RemoteFile]:
            return [RemoteFile("model.safetensors", 1 << 60, "0" * 64)]

    with pytest.raises(ModelError, match="has room for"):
        download(Huge(f"file://{model}"), tmp_path / "here", silent)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nothing://a/b", "cannot be opened"),
        ("file:///nowhere/at/all", "does not exist"),
        ("neither", "neither a folder"),
    ],
)
def test_a_source_that_is_none_is_an_error_that_names_it(address: str, said: str, tmp_path: Path) -> None:
    ended = _program("--source", address, "--folder", str(tmp_path / "here"))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert address in ended.stderr
    assert re.search(said, ended.stderr)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = _program("--source", f"file://{model}", "--folder", str(tmp_path / "file/here"))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert str(tmp_path / "file/here") in ended.stderr


def test_the_program_waits_for_the_model_that_another_one_brings(model: Path, tmp_path: Path) -> None:
    options = ("--source", f"file://{model}", "--folder", str(tmp_path / "here"))
    with subprocess.Popen(
        [sys.executable, "-m", "services.models", *options, "--wait"], stdout=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout is not None
        assert "waiting for" in waiting.stdout.readline()
        assert _program(*options).returncode == 0
        assert waiting.wait(60) == 0
    assert content(tmp_path / "here") == WANTED


def _program(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.models", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the model."""
    server = Hub(FILES)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_of_the_hub_comes_at_one_commit_with_a_token_and_with_its_checksums(
    hub: Hub, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    options = ("--source", "organization/name", "--folder", str(here))
    environment = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    environment["HF_HOME"] = str(tmp_path / "home")
    refused = _program(*options, **environment)
    assert refused.returncode == 1
    assert "hf://organization/name" in refused.stderr
    assert "Traceback" not in refused.stderr
    ended = _program(*options, **environment, HF_TOKEN=TOKEN)
    assert ended.returncode == 0, ended.stderr
    assert content(here) == WANTED
    receipt = read_receipt(here)
    assert receipt is not None
    assert receipt.resolved == f"organization/name@{COMMIT}"


def test_each_checksum_of_the_hub_is_of_the_kind_that_it_has(model: Path, tmp_path: Path) -> None:
    config = FILES["config.json"]
    blob = hashlib.sha1(b"blob %d\0" % len(config) + config, usedforsecurity=False).hexdigest()

    class Listed(Source):
        checksum = blob

        def files(self) -> list[RemoteFile]:
            return [RemoteFile("config.json", len(config), self.checksum, "git")]

    download(Listed(f"file://{model}"), tmp_path / "here", silent)
    source = Listed(f"file://{model}")
    source.checksum = "0" * 40
    with pytest.raises(ModelError, match="does not have the git checksum"):
        download(source, tmp_path / "there", silent, pause=lambda _seconds: None)
