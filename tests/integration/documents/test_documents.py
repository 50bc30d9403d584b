"""The commands of the documents run: in front of a real gateway and facade, with instances that have no model.

Blocks that are not run say why in the source of their page (`tests.support.documents`).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paceline import Client
from paceline.cli.app import run as run_command
from services.policy.config import PolicyConfig
from tests.integration.documents.trainer_names import play, policy_folder, run_block
from tests.integration.facade.conftest import StackMaker, cluster, stack_of, tokenizer_folder
from tests.integration.gateway.conftest import CALL, Cluster
from tests.integration.policy.conftest import Running, until
from tests.support.documents import COMMANDS, Block, DocumentError, read

__all__ = ["cluster", "stack_of", "tokenizer_folder"]

ROOT = Path(__file__).parents[3]
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```" in path.read_text()
]
MODELS = ("runs/models/smollm2", "models/Qwen3-8B")
"""Models of the pages, of which only the tokenizer is read here."""
_PROGRAM = re.compile(r"(?:\.venv/bin/)?python (\w+\.py.*)\n")
_MODULE = re.compile(r"(?:\.venv/bin/)?python -m (services[\w.]+ .*)\n")
_REDIS = "redis://..."
"""Address that a page leaves to its reader."""
_HOSTS = re.compile(r"\b(?:localhost|127\.0\.0\.1|gateway|HOST):(7400|8000)\b")
_RUN_ID = re.compile(r"^(?:\.venv/bin/)?paceline .*--run ([\w-]+)", re.MULTILINE)


class Desk:
    """A folder like a checkout with a platform, in which a reader types the blocks of a page."""

    def __init__(self, folder: Path, gateway: str, facade: str, redis: str, tokenizer: Path) -> None:
        self.folder = folder
        self.gateway = gateway
        self._redis = redis
        self._addresses = {"7400": gateway, "8000": facade}
        for path in ROOT.iterdir():
            if path.name not in ("runs", "docs"):
                (folder / path.name).symlink_to(path)
        for model in MODELS:
            (folder / model).parent.mkdir(parents=True)
            (folder / model).symlink_to(tokenizer)
        (folder / "runs/local").mkdir()
        (folder / "runs/local/token").write_text("none is needed")
        (folder / "bin").mkdir()
        helm = folder / "bin/helm"
        helm.write_text(
            f'#!/bin/sh\nexec {sys.executable} -m tests.integration.documents.helm_without_cluster "$@"\n'
        )
        helm.chmod(0o755)
        (folder / "weights/qwen3-8b").mkdir(parents=True)
        self.weights = policy_folder(folder / "runs")
        self._environment = os.environ | {
            "PATH": f"{folder}/bin:{ROOT}/.venv/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PACELINE_ADDRESS": gateway,
        }

    async def type(self, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
        """Save a block in the file that it names, or run it. It has to succeed."""
        text = _HOSTS.sub(lambda at: self._addresses[at[1]], block.text).replace(_REDIS, self._redis)
        if block.file:
            (self.folder / block.file).write_text(text)
        elif block.language == "python":
            text = text.replace('Path("/weights/', f'Path("{self.folder}/weights/')
            await asyncio.to_thread(run_block, text, block.line, self.gateway, self.weights)
        elif program := _PROGRAM.fullmatch(text):
            # In this process: in another one importing would take longer than all else.
            monkeypatch.setattr(sys, "argv", shlex.split(program[1]))
            await asyncio.to_thread(runpy.run_path, sys.argv[0], run_name="__main__")
        elif module := _MODULE.fullmatch(text):
            monkeypatch.delenv("PACELINE_ADDRESS", raising=False)
            monkeypatch.setattr(sys, "argv", shlex.split(module[1]))
            await asyncio.to_thread(importlib.import_module(sys.argv[0]).main)
        elif commands := commands_of_paceline(text):
            monkeypatch.setenv("PACELINE_ADDRESS", self.gateway)
            for each in commands:
                assert await asyncio.to_thread(run_command, each) == 0, each
        else:
            await self._run("bash", "-euo", "pipefail", "-c", text)

    async def _run(self, *command: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(CALL):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, f"{command[-1]}\n{said.decode()}"


def commands_of_paceline(text: str) -> list[list[str]]:
    """Return the arguments of a block's commands; none if it has other programs, or needs a shell."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", "").splitlines()]
    of_paceline = all(words[0].removeprefix(".venv/bin/") == "paceline" for words in lines if words)
    plain = of_paceline and not any(set(word) & set("|&;<>$`*") for words in lines for word in words)
    return [words[1:] for words in lines if words] if plain else []


DeskMaker = Callable[[], Awaitable[Desk]]


@pytest.fixture
async def desk_of_a_reader(
    stack_of: StackMaker,
    cluster: Cluster,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[DeskMaker]:
    """Return a function that starts the platform."""
    config = PolicyConfig(redis_url=cluster.redis_url, namespace=cluster.namespace, port=0, lease_seconds=1.0)
    policy = Running(config)

    async def make() -> Desk:
        # Longer than a block asks for.
        monkeypatch.setattr("tests.support.fake_instance.MAX_MODEL_LEN", 1 << 15)
        stack = await stack_of(model=tokenizer_folder)
        await policy.start()
        await until(policy.leads, "the policy service leads")
        facade = stack.facade.url.removeprefix("http://")
        desk = Desk(tmp_path, stack.gateway.gateway.address, facade, cluster.redis_url, tokenizer_folder)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Client, "run", functools.partialmethod(Client.run, weights=desk.weights))
        return desk

    yield make
    await policy.kill()


def used_later(block: Block, blocks: list[Block]) -> bool:
    """Say whether a command below a block uses the file that it names."""
    return any(block.file in each.text for each in blocks if each.line > block.line and each.language == "sh")


@pytest.mark.parametrize("page", PAGES)
async def test_the_blocks_of_a_page_run(
    page: str, desk_of_a_reader: DeskMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = read((ROOT / page).read_text())
    typed = [block for block in blocks if not block.reason and (block.language in COMMANDS or block.file)]
    if any(block.language in COMMANDS for block in typed):
        desk = await desk_of_a_reader()
        if not any(block.file for block in typed):
            for run_id in {run_id for block in typed for run_id in _RUN_ID.findall(block.text)}:
                await asyncio.to_thread(play, run_id, desk.gateway, desk.weights)
        for block in typed:
            if block.file:
                assert used_later(block, blocks), f"{page}:{block.line}: no command uses {block.file}"
            await desk.type(block, monkeypatch)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```\nmake\n```", "language ''"),
        ("<!-- not run: why -->\n\nText.\n\n```sh\nmake\n```", "1 comments"),
        ("<!-- not run with helm: why -->\n\n```sh\nmake\n```", "helm"),
    ],
)
def test_a_page_that_says_nothing_of_a_block_is_refused(page: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        read(page)


def test_a_reason_belongs_to_its_block_alone() -> None:
    slow, quick = "<!-- not run: slow -->\n```sh\nmake\n```\n", "```sh\nmake help\n```\n"
    far = "<!-- not run with npm: far -->\n```sh\ncd x && npm ci\n```"
    assert [block.reason for block in read(slow + quick + far)] == ["slow", "", "far"]
