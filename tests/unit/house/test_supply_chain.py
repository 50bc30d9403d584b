"""What is installed, built on and run comes by hash, digest or commit; locks are those of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
LOCKS = sorted([*(ROOT / "requirements").glob("*.lock"), *(ROOT / "deploy/docker").glob("*.lock")])
BY_TAG = {"valkey/valkey", "oliver006/redis_exporter"}
"""Images whose digest could not be looked up here: docs/operations.md says how to pin them."""
UNLOCKED = {
    # Tools of developers: one compiles an sdist beside the PyTorch of .venv, one takes any version of Triton.
    *("scripts/arctic", "scripts/compiled-kernels"),
    # Wheels that the build has just made.
    "/wheels/*.whl",
}
EXTRAS = {
    "cpu": {"cpu", "demo", "dev", "docs", "http", "k8s", "kernels", "models", "ray", "tracing", "trl"},
    "cuda": {"cuda", "demo", "dev", "http", "kernels", "models", "tracing", "trl"},
}
"""Of scripts/lock."""
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def entries(text: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield name, version and hashes of each package of a lock. AssertionError for a line that is none."""
    for entry in re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE):
        if entry.startswith(("#", " ", "\n")) or not entry:
            continue
        pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)(?= |$)", entry, re.MULTILINE)
        assert pin is not None, f"no pin: {entry.splitlines()[0]}"
        yield (
            canonicalize_name(pin[1]),
            pin[2],
            frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)),
        )


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_line_of_a_lock_is_a_version_with_hashes(lock: Path) -> None:
    found = list(entries(lock.read_text()))
    assert found
    assert [name for name, _, hashes in found if not hashes] == []
    assert len({name for name, *_ in found}) == len(found)
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", lock.read_text())


@pytest.mark.parametrize(
    "line", ["numpy", "numpy>=2", "numpy==2.3.5", "numpy==2.3.5 --hash=md5:00", "-e .", "git+https://host/x"]
)
def test_a_line_without_a_hash_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        assert all(hashes for *_, hashes in entries(f"{line}\n"))


def test_one_version_has_the_same_hashes_in_all_locks() -> None:
    seen: dict[tuple[str, str], tuple[str, frozenset[str]]] = {}
    for lock in LOCKS:
        # That one has a wheel for each package, of another Python.
        if lock.name != "gpu-pack.lock":
            for name, version, hashes in entries(lock.read_text()):
                first, known = seen.setdefault((name, version), (lock.name, hashes))
                assert hashes == known, (
                    f"{name} in {first} and {lock.name}: run scripts/lock and scripts/images"
                )


def test_a_wheel_of_the_pack_is_one_of_the_cuda_lock() -> None:
    locks = (ROOT / f"requirements/{name}.lock" for name in ("gpu-pack", "cuda"))
    pack, cuda = (
        {name: (version, hashes) for name, version, hashes in entries(lock.read_text())} for lock in locks
    )
    for name, (version, hashes) in pack.items():
        assert version == cuda[name][0]
        assert hashes <= cuda[name][1]


@pytest.mark.parametrize("device", EXTRAS)
def test_a_lock_has_what_pyproject_asks_for(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    script = (ROOT / "scripts/lock").read_text()
    shared, own = re.findall(r"project=\((.*)\)", script), re.findall(rf"resolve {device} (.*)", script)
    assert set(re.findall(r"--extra (\w+)", shared[0] + own[0])) == EXTRAS[device]
    pins = {name: version for name, version, _ in entries((ROOT / f"requirements/{device}.lock").read_text())}
    wanted = {*EXTRAS[device]}
    while (
        more := {
            extra
            for each in wanted
            for line in extras[each]
            if (need := Requirement(line)).name == project["name"]
            for extra in need.extras
        }
        - wanted
    ):
        wanted |= more
    lines = [*project["dependencies"], *(line for extra in wanted for line in extras[extra])]
    for need in map(Requirement, lines):
        if need.name != project["name"]:
            version = pins.get(canonicalize_name(need.name))
            assert version is not None, f"{need}: run scripts/lock"
            assert need.specifier.contains(Version(version), prereleases=True), (
                f"{need}, not {version}: run scripts/lock"
            )


@pytest.mark.parametrize("name", ["bootstrap", "cluster-tools", "router", "smollm2", "verl", "verl-package"])
def test_a_lock_has_what_its_source_asks_for(name: str) -> None:
    pins = {each: version for each, version, _ in entries((ROOT / f"requirements/{name}.lock").read_text())}
    source = (ROOT / f"requirements/{name}.in").read_text().splitlines()
    for need in [Requirement(line) for line in source if line and not line.startswith("#")]:
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), f"{need}: run scripts/lock"


def test_whatever_installs_checks_hashes_and_asks_one_index() -> None:
    files = [*(ROOT / "scripts").iterdir(), ROOT / "Makefile", ROOT / "deploy/docker/Dockerfile"]
    files += [*(ROOT / ".github").rglob("*.yml"), *(ROOT / ".ci").iterdir()]
    found = 0
    for file in files:
        text = re.sub(r"\\\n\s*", "", file.read_text())
        name = str(file.relative_to(ROOT))
        assert "--extra-index-url" not in text, name
        assert "unsafe-" not in text, name
        for line in text.splitlines():
            if not re.search(r"\bpip\b.* (install|wheel) ", line) or line.lstrip().startswith("#"):
                continue
            found += 1
            by_hash = "--require-hashes" in line and "--no-deps" in line
            own = (
                "--no-deps" in line and "--no-build-isolation" in line and re.search(r" (-e )?\.( |$)", line)
            )
            assert by_hash or own or name in UNLOCKED or any(each in line for each in UNLOCKED), (
                f"{name}: {line}"
            )
    assert found >= 8


def test_actions_are_named_by_commit_with_their_version() -> None:
    for workflow in (ROOT / ".github/workflows").iterdir():
        used = re.findall(r"uses: *(.*)", workflow.read_text())
        assert used
        for each in used:
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), (
                f"{workflow.name}: {each}"
            )


def _images(node: Any) -> Iterator[str]:
    """Yield the images that a document names: of Compose and Kubernetes, and those of the chart's values."""
    if isinstance(node, dict):
        if isinstance(node.get("image"), str):
            yield node["image"]
        if "repository" in node and "tag" in node:
            yield f"{node['repository']}:{node['tag']}" + (f"@{node['digest']}" if node.get("digest") else "")
        for each in node.values():
            yield from _images(each)
    elif isinstance(node, list):
        for each in node:
            yield from _images(each)


def test_images_of_others_are_named_by_digest() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", dockerfile, re.MULTILINE))
    used = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    used = [arguments[each[2:-1]] if each.startswith("${") else each for each in used]
    used += re.findall(r"^# syntax=(\S+)", dockerfile)
    used += re.findall(r"^ARG \w*IMAGE\w*=(\S+)", dockerfile, re.MULTILINE)
    documents = [*(ROOT / "deploy/compose").iterdir(), *(ROOT / "deploy/kind").glob("*.yaml")]
    documents += [ROOT / "helm/paceline/values.yaml", ROOT / "deploy/ray/raycluster.yaml"]
    for file in documents:
        used += [image for document in yaml.safe_load_all(file.read_text()) for image in _images(document)]
    assert len(used) >= 12
    others = {each for each in used if each not in stages and not re.match(r"(REGISTRY/)?paceline-", each)}
    by_tag = {each.partition(":")[0] for each in others if not DIGEST.search(each)}
    assert by_tag == BY_TAG
