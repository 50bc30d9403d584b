"""The README's two commands exist and are the ones that continuous integration runs."""

import re
from pathlib import Path

from deploy.site import protocol_page, settings_page

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "bench", "helm", "kernels")


def test_readme_shows_the_two_commands_and_ci_runs_the_tests_by_the_same_one() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"^make (\w+)$", readme, re.MULTILINE)
    assert commands[:2] == ["demo", "test"]
    assert set(commands) <= targets
    ci = (ROOT / ".ci/run").read_text()
    assert re.search(r"^make (\w+ )*test$", ci, re.MULTILINE)


def test_documents_are_whole_and_their_links_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(each for name in FOLDERS for each in (ROOT / name).rglob("*.md"))]
    for document in documents:
        text = document.read_text()
        assert not re.search("^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE), (
            f"{document.name} has marks of a merge"
        )
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            made = Path(target).name in (protocol_page.PAGE, settings_page.PAGE)
            assert made or (document.parent / target).exists(), f"{document.name} links to {target}"
