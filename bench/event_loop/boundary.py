"""Cost of a step across a process boundary, if the engine is in a process of its own by vLLM's own means.

Its engine core sends the outcome of a step as msgpack over a ZeroMQ socket. A step of ours also takes what drafters
must know of the samples that decode, and brings the drafts back.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

_TIMES = 50
_DRAFTS = 4
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(sys.argv[1])
while message := socket.recv():
    socket.send(message)
"""


class Boundary:
    """Keeps the largest step of an engine, whose outcome and samples are then sent to and fro."""

    def __init__(self, engine: Any) -> None:
        self._outputs: list[Any] = []
        self._samples: list[tuple[Any, ...]] = []
        outcome = engine._outcome

        def kept(outputs: Any) -> Any:
            found = list(outputs)
            if len(found) > len(self._outputs):
                self._outputs = found
                self._samples = [
                    (each.sample_id, each.room, each.length, len(each.response)) for each in engine.decoding()
                ]
            return outcome(found)

        engine._outcome = kept

    def seconds(self) -> dict[str, Any]:
        """Measure, in the engine thread: processor time to write and to read, and a round trip of nothing."""
        import msgspec
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        outputs = EngineCoreOutputs(outputs=self._outputs)
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        written = encoder.encode(outputs)
        drafts = {each[0]: list(range(_DRAFTS)) for each in self._samples}
        packed = msgspec.msgpack.encode((self._samples, drafts))
        return {
            "samples": len(self._outputs),
            "bytes": sum(map(len, written)) + len(packed),
            "write_outputs": _timed(lambda: encoder.encode(outputs)),
            "read_outputs": _timed(lambda: decoder.decode(written)),
            "write_drafts": _timed(lambda: msgspec.msgpack.encode((self._samples, drafts))),
            "read_drafts": _timed(lambda: msgspec.msgpack.decode(packed)),
            "round_trip": _round_trip(),
        }


def _timed(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TIMES):
        began = time.thread_time()
        run()
        taken.append(time.thread_time() - began)
    return median(taken)


def _round_trip() -> float:
    """Return the seconds of an empty message to another process and back over vLLM's kind of socket."""
    import zmq

    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/boundary"
        socket = context.socket(zmq.PAIR)
        socket.bind(address)
        echo = subprocess.Popen([sys.executable, "-c", _ECHO, address])
        taken = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            socket.send(b".")
            socket.recv()
            taken.append(time.perf_counter() - began)
        socket.send(b"")
        echo.wait()
        socket.close()
    return median(taken)
