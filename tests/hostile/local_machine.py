"""Attacks of other users of the machine, and of who listens on the network."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from paceline import AsyncClient, Client
from paceline.errors import PacelineError
from services.platform.redis.embedded import EmbeddedRedis
from tests.hostile.answers import Answer, Attack, either
from tests.hostile.rig import Rig, token_of

REFUSED, HEARD = "refused", "heard"


def token_in_plain_text(rig: Rig, _: int) -> list[Answer]:
    """Have the SDK call a gateway beyond loopback without TLS, and listen for its token there."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        listener.settimeout(0.2)
        outer = _own_address()
        address = f"{outer}:{listener.getsockname()[1]}"
        answers = []
        for make in (Client, AsyncClient):
            try:
                make(address, token=token_of("services"))
            except (ValueError, PacelineError) as error:
                answers.append(Answer(REFUSED, str(error)))
            else:
                answers.append(Answer(HEARD, f"{make.__name__} would send it to {address}"))
        return answers


def _own_address() -> str:
    """Return an address of this machine that is not loopback; one of documentation if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            found = str(probe.getsockname()[0])
        except OSError:
            found = "192.0.2.2"
    return "192.0.2.2" if found.startswith("127.") else found


def folder_made_by_another(make: Callable[[Path], None]) -> Callable[[Rig, int], list[Answer]]:
    """Return what makes the folder of Redis's socket before its owner does, where its path is long."""

    def send(rig: Rig, _: int) -> list[Answer]:
        place = Path(tempfile.mkdtemp(dir=rig.folder))
        shared = place / "t"
        shared.mkdir(mode=0o1777)
        before = {name: os.environ.pop(name, None) for name in ("TMPDIR", "XDG_RUNTIME_DIR")}
        folder = place / ("long" * 30)
        tempfile.tempdir, os.environ["TMPDIR"] = str(shared), str(shared)
        try:
            # Where another user expects it.
            make(shared / f"paceline-{os.getuid()}")
            return [_started(folder)]
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            os.environ.update({name: value for name, value in before.items() if value is not None})

    return send


def _started(folder: Path) -> Answer:
    """Return whether a server's socket lies where nobody else can put one in its place."""
    server = EmbeddedRedis(folder)
    place = Path(server.url.removeprefix("unix://")).parent
    made = threading.current_thread() is threading.main_thread()
    assert made, "a server dies with its thread"
    try:
        server.start()
    except (RuntimeError, OSError) as error:
        return Answer(REFUSED, str(error))
    try:
        found = place.lstat()
        own = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
        return Answer(REFUSED if own and stat.S_ISDIR(found.st_mode) else HEARD, f"the socket is in {place}")
    finally:
        server.stop()


def open_folder(place: Path) -> None:
    """A folder that everybody may write to."""
    place.mkdir()
    place.chmod(0o777)


def link(place: Path) -> None:
    """A link to a folder of somebody else's."""
    target = place.with_name("of-another")
    open_folder(target)
    place.symlink_to(target)


def of_another(place: Path) -> None:
    """A folder of another user."""
    place.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(place, 65534, 65534)
    else:
        place.chmod(0o777)


def arguments(rig: Rig, _: int) -> list[Answer]:
    """Look for tokens in the arguments of all processes, which every user can read."""
    found = [
        path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if b"secret-of-" in _read(path)
    ]
    return [Answer(HEARD if found else REFUSED, f"processes {found}")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


ATTACKS: list[Attack] = [
    Attack("token in plain text", "S1", token_in_plain_text, either(REFUSED, typed=False)),
    Attack(
        "open folder of the socket", "S6", folder_made_by_another(open_folder), either(REFUSED, typed=False)
    ),
    Attack("link as folder of the socket", "S6", folder_made_by_another(link), either(REFUSED, typed=False)),
    Attack(
        "another's folder of the socket",
        "S6",
        folder_made_by_another(of_another),
        either(REFUSED, typed=False),
    ),
    Attack("secrets in arguments", "S7", arguments, either(REFUSED, typed=False)),
]
