"""A receiver as a program of its own, for benchmarks and tests: `python -m distill.transfermesh.serve`.

Reads one JSON line {"key": hex, "name": str, "host": str, "timeout_s": float} from standard input (a command line can
be read by every user of the machine), prints its endpoint as one JSON line, and ends when its input does: it never
outlives the program that started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import TracebackType

from distill.errors import DistillError, MeshError
from distill.transfermesh.endpoint import Endpoint
from distill.transfermesh.loader import MemoryLoader
from distill.transfermesh.receiver import Receiver

_START_S = 60.0


class Child:
    """A receiver in a child process, started by `module` (this one unless told otherwise) and ended by `close`."""

    def __init__(
        self,
        key: bytes,
        name: str,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 120.0,
        module: str = __name__,
        **more: object,
    ) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        order = {"key": key.hex(), "name": name, "host": host, "timeout_s": timeout_s, **more}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.endpoint = self._endpoint(name)

    def read_line(self, deadline_s: float = _START_S) -> str:
        """The next line that the child prints. Kills it and raises MeshError past the deadline."""
        assert self.process.stdout is not None
        timer = threading.Timer(deadline_s, self.process.kill)
        timer.start()
        line = self.process.stdout.readline().decode().strip()
        timer.cancel()
        if not line:
            raise MeshError(f"the receiver process {self.process.pid} ended, or said nothing for {deadline_s:g} s")
        return line

    def _endpoint(self, name: str) -> Endpoint:
        try:
            return Endpoint.from_dict(json.loads(self.read_line()))
        except MeshError:
            self.close()
            raise

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> int:
    order = json.loads(sys.stdin.readline())
    try:
        receiver = Receiver(
            bytes.fromhex(order["key"]),
            MemoryLoader(),
            host=order["host"],
            name=order["name"],
            timeout_s=order["timeout_s"],
        ).start()
    except DistillError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(receiver.endpoint.to_dict()), flush=True)
    sys.stdin.read()
    receiver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
