"""Folders of weights by name: what Linux cannot open is refused before anybody tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.contracts.errors import InvalidArgument
from services.contracts.files import check_weight_folder


@pytest.mark.parametrize("path", ["/a", "/" + "x" * 255, "/" + "é" * 127, "/x" * 2047])
def test_a_path_that_linux_opens_is_taken(path: str) -> None:
    check_weight_folder(path, None)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "absolute"),
        ("relative", "absolute"),
        ("file:///etc", "absolute"),
        ("/etc\0", "NUL"),
        ("/" + "x" * 256, "255 in each name"),
        ("/" + "é" * 128, "255 in each name"),
        ("/x" * 2048, "at most 4095 bytes"),
        ("/nowhere/" + "x" * 70_000, "at most 4095 bytes"),
        ("/\ud800", "UTF-8"),
    ],
)
@pytest.mark.parametrize("root", [None, Path("/weights")])
def test_any_other_is_refused_with_the_reason_and_in_few_words(
    path: str, reason: str, root: Path | None
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_weight_folder(path, root)
    (violation,) = refused.value.violations
    assert violation.field == "disk.path"
    assert reason in violation.description
    assert len(violation.description) < 400
