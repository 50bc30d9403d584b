"""Kernels compile where no cache can be written, and a cache never serves other sources."""

import logging

import numba

from kernels.jit import entry, source_fingerprint


def increment(x):
    return x + 1


def test_entry_is_compiled_without_a_cache_when_there_is_nowhere_to_write(monkeypatch, caplog):
    real = numba.njit

    def njit(*functions, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*functions, **options)

    monkeypatch.setattr(numba, "njit", njit)
    with caplog.at_level(logging.WARNING):
        compiled = entry("sources")(increment)
    assert compiled(1) == 2
    assert "NUMBA_CACHE_DIR" in caplog.text


def cached_entry(fingerprint):
    @entry(fingerprint)
    def add(x):
        return x + 1

    return add


def test_each_version_has_files_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    first, again, changed = cached_entry("a"), cached_entry("a"), cached_entry("b")
    assert [add(1) for add in (first, again, changed)] == [2, 2, 2]
    hits = [sum(add.stats.cache_hits.values()) for add in (first, again, changed)]
    assert hits == [0, 1, 0]
    indexes = sorted(path.name.split("-")[0] for path in tmp_path.rglob("*.nbi"))
    assert [name[-6:] for name in indexes] == [".add_a", ".add_b"]


def test_fingerprint_changes_with_any_source(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("y = 1")
    before = source_fingerprint(tmp_path)
    assert source_fingerprint(tmp_path) == before
    (tmp_path / "b.py").write_text("y = 2")
    assert source_fingerprint(tmp_path) != before
