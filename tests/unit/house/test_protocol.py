"""The protocol: committed stubs are the ones that the protos give, and old clients are not broken."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_committed_stubs_are_generated_from_the_protos(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts/protos", tmp_path], check=True, cwd=ROOT)
    generated = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*_pb2*.py*")}
    committed = {
        file.relative_to(ROOT): file.read_text()
        for file in (ROOT / "paceline").rglob("*_pb2*.py*")
        if "__pycache__" not in file.parts
    }
    assert len(generated) >= 15
    assert committed == generated


def test_protos_pass_the_linter_and_break_no_published_message() -> None:
    buf = ROOT / ".venv/bin/buf"
    subprocess.run([buf, "lint"], check=True, cwd=ROOT)
    subprocess.run([buf, "breaking", "--against", "protos/baseline.binpb"], check=True, cwd=ROOT)
