"""Show links to files of the repository that the site lacks as the paths of these files. A hook of MkDocs."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^]\n]+(?:\n[^]\n]+)?)\]\(((?:\.\./)+[^)#:\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace a page's links to files outside docs, such as README files of benchmarks, by text and path."""
    return shown(markdown, ROOT / "docs" / page.file.src_uri)


def shown(markdown: str, source: Path) -> str:
    """Return a page's Markdown in which each link out of docs is the link's text and the file's path."""

    def path_of(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return link[0]
        return f"{link[1]}, `{target.relative_to(ROOT)}`"

    return _LINK.sub(path_of, markdown)
