"""Lists of a model's files."""

from __future__ import annotations

import pytest

from services.models.source import ListingError, RemoteFile, inside, read_checksums, wanted

HASH = "ab" * 32


def test_lines_of_sha256sum_are_read_in_both_of_its_forms() -> None:
    text = f"{HASH}  config.json\n\n{HASH.upper()} *sub/model.safetensors\n"
    assert read_checksums(text) == {"config.json": HASH, "sub/model.safetensors": HASH}


@pytest.mark.parametrize("text", ["", "\n", "config.json", f"{HASH[:-1]}  a", f"{HASH}  ../a", f"{HASH}  /a"])
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(ListingError):
        read_checksums(text)


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../up", "a/../../up", "a\\b"])
def test_no_file_leads_out_of_the_folder(path: str) -> None:
    with pytest.raises(ListingError, match="leads out"):
        inside(path)
    assert inside("./a//b") == "a/b"


def test_weights_in_other_forms_are_left_out_where_there_are_safetensors_only() -> None:
    names = ["config.json", "model.safetensors", "pytorch_model.bin", "original/c.pth", "README.md"]
    assert [each.path for each in wanted(map(RemoteFile, names))] == ["config.json", "model.safetensors"]
    assert [each.path for each in wanted(map(RemoteFile, ["config.json", "pytorch_model.bin"]))] == [
        "config.json",
        "pytorch_model.bin",
    ]
