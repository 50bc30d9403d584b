"""Links of the pages to files that the site does not have."""

from __future__ import annotations

from deploy.site.repository_links import ROOT, shown


def test_links_out_of_docs_become_paths_and_other_links_stay() -> None:
    page = "([all\npoints](../bench/axes/README.md#figures)), [SDK](sdk.md), [a](../bench/none.md)"
    assert shown(page, ROOT / "docs/performance.md") == page.replace(
        "[all\npoints](../bench/axes/README.md#figures)", "all\npoints, `bench/axes/README.md`"
    )
    nested = "[why](../0001.md) [b](../../bench/axes/README.md)"
    assert shown(nested, ROOT / "docs/tutorials/1-trl.md") == "[why](../0001.md) b, `bench/axes/README.md`"
