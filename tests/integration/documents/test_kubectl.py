"""kubectl takes every command of the documents: each fails only because no server is at its address.

So names of commands, resources' syntax, options and their values are what kubectl knows. What a server would answer
is not seen. Skipped where kubectl is not installed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.documents import commands, read
from tests.support.ports import NOBODY

ROOT = Path(__file__).parents[3]
KUBECTL = shutil.which("kubectl")
POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: trainer}\nspec: {containers: [{name: c, image: i}]}\n"
_INLINE = re.compile(r"`(kubectl [^`]* --[^`]+)`")


def of_kubectl(page: str) -> list[list[str]]:
    """Return the arguments of a page's commands of kubectl, those in its text among them if they have options."""
    texts = [block.text for block in read(page) if block.language == "sh"]
    texts += [" ".join(found.split()) for found in _INLINE.findall(page)]
    found = []
    for text in texts:
        for words in commands(text):
            words = words[1:] if words[:1] == ["do"] else words
            if words[:1] == ["kubectl"] and words[1:] not in found:
                found.append(words[1:])
    return found


PAGES = {
    str(path.relative_to(ROOT / "docs")): found
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if (found := of_kubectl(path.read_text()))
}


def test_pages_of_operators_have_commands() -> None:
    assert len(PAGES["operations.md"]) >= 12
    assert len(PAGES["runbook.md"]) >= 15


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_kubectl_takes_the_commands(page: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.yaml").write_text(POD)
    (tmp_path / "config").write_text("apiVersion: v1\nkind: Config\n")
    assert KUBECTL is not None
    refused = {}
    for words in PAGES[page]:
        ended = subprocess.run(
            [KUBECTL, f"--server={NOBODY}", *words],
            input=POD,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "config")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        nobody = "connection refused" in ended.stderr or "was refused" in ended.stderr
        if ended.returncode != 0 if "--dry-run=client" in words else not nobody:
            refused[shlex.join(words)] = ended.stderr[-300:] or f"status {ended.returncode}"
    assert refused == {}
