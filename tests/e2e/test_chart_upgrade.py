"""`helm upgrade` of every component, from the previous version's processes to this one's, while steps go on."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.e2e.chart_release import POOL, WORKLOADS, ChartRelease, Step, values
from tests.support.cluster import kernel
from tests.support.cluster.launcher import ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(kernel.lacks()), reason=kernel.lacks()),
]


def git(*words: str) -> str:
    """What git says; empty if it fails."""
    ended = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else ""


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A checkout of the last release, or else of the commit before this one."""
    revision = git("describe", "--tags", "--abbrev=0", "HEAD~1") or git("rev-parse", "--verify", "HEAD~1")
    if not revision:
        pytest.skip("the history of git is not here, so that there is no version to upgrade from")
    tree = tmp_path / "before"
    tree.mkdir()
    archive = tmp_path / "before.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", f"--output={archive}", revision], check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return tree


def test_steps_go_on_through_an_upgrade_of_everything(before: Path, tmp_path: Path) -> None:
    release = ChartRelease(tmp_path / "cluster", {"before": before})
    cluster = release.cluster
    with cluster:
        given = values("before")
        # Standbys of gateways that did not pass calls on were never ready.
        given["gateway"]["replicas"] = 1
        release.install(given, before / "helm/paceline")
        release.wait_up(400)
        former = {each.pod.name: each.revision for _, each in cluster.pods.values()}
        quiet, instances = Step(release, "quiet").result()
        assert instances == [f"{POOL}-0", f"{POOL}-1"]

        steps = [Step(release, "upgraded-0").begun()]
        release.install(values())
        checksums = [steps[-1].result()[0]]
        while not release.up():
            steps.append(Step(release, f"upgraded-{len(steps)}"))
            checksums.append(steps[-1].result()[0])
        assert set(checksums) == {quiet}
        release.wait_up(60)

        assert Step(release, "afterwards").result() == (quiet, [f"{POOL}-0", f"{POOL}-1"])
        for key in WORKLOADS[1:]:
            for each in cluster.of(*key):
                assert all(one.image.endswith(":now") for one in each.pod.containers), each.pod.name
                assert former.get(each.pod.name) != each.revision
        # Redis is somebody else's image, and is left alone.
        assert former["paceline-redis-0"] == cluster.pod("paceline-redis-0").revision
        assert [each.pod.name for each in cluster.ended if each.overran] == []
