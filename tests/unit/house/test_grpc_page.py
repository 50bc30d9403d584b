"""docs/grpc.md names every reason of an error, and buf.gen.yaml gives every file the packages that Go needs."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from google.protobuf.compiler import plugin_pb2

ROOT = Path(__file__).parents[3]
CODES = {
    "FailedPrecondition": "FAILED_PRECONDITION",
    "Aborted": "ABORTED",
    "PermissionDenied": "PERMISSION_DENIED",
}
"""Errors that are made with a reason, and their codes."""
_REASON = re.compile(r"[A-Z]+(_[A-Z]+)+")
PLUGIN = f"""#!{sys.executable}
import sys
from google.protobuf.compiler import plugin_pb2
request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
answer = plugin_pb2.CodeGeneratorResponse()
answer.file.add(name="request.bin", content=request.SerializeToString().hex())
sys.stdout.buffer.write(answer.SerializeToString())
"""


def reasons_of(text: str) -> set[tuple[str, str]]:
    """Return reason and code of each error that a module makes."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODES:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            words = [each.value for each in given if isinstance(each, ast.Constant)]
            named = [word for word in words if isinstance(word, str) and _REASON.fullmatch(word)]
            found |= {(word, CODES[node.func.id]) for word in named}
    return found


def test_the_page_has_each_reason_with_its_code() -> None:
    rows = [
        line.split(" | ") for line in (ROOT / "docs/grpc.md").read_text().splitlines() if line[:2] == "| "
    ]
    told = {
        (row[0].removeprefix("| "), row[1]) for row in rows if len(row) == 4 and _REASON.match(row[0][2:])
    }
    made = set[tuple[str, str]]()
    for path in (ROOT / "services").rglob("*.py"):
        made |= reasons_of(path.read_text())
    assert len(made) > 20
    assert told == made


def test_stubs_have_the_packages_that_go_needs(tmp_path: Path) -> None:
    """By a plugin that writes down what it is asked for: those of the template are at another place."""
    buf = ROOT / ".venv/bin/buf"
    if not buf.exists():
        pytest.skip("buf is not installed")
    plugin = tmp_path / "protoc-gen-ask"
    plugin.write_text(PLUGIN)
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    template = yaml.safe_load((ROOT / "buf.gen.yaml").read_text())
    template["plugins"] = [{"local": str(plugin), "out": str(tmp_path), "strategy": "all"}]
    made = tmp_path / "buf.gen.yaml"
    made.write_text(yaml.safe_dump(template))
    environment = os.environ | {"BUF_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([buf, "generate", "--template", made], cwd=ROOT, check=True, timeout=120, env=environment)
    asked = plugin_pb2.CodeGeneratorRequest.FromString(bytes.fromhex((tmp_path / "request.bin").read_text()))
    ours = [file for file in asked.proto_file if file.name.startswith("paceline/")]
    assert len(ours) > 5
    for file in ours:
        assert file.options.go_package.startswith("example.com/trainer/gen/paceline/"), file.name
        assert file.options.java_package
