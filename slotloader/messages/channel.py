"""Messages between the trainer, its nursery and its workers: pickled objects over a socket, descriptors beside them.

Never on the hot path. Both ends are processes of one user that one trainer started.
"""

from __future__ import annotations

import array
import pickle
import socket
import threading
from typing import Any

import cloudpickle

from slotloader.messages.stream import HEAD


class Channel:
    """One end of a stream socket that carries whole messages.

    Raises from `send` and `receive`: EOFError once the other side is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()  # messages of several threads must not interleave

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends one message; `fds` are duplicated into the receiver."""
        self.send_bytes(cloudpickle.dumps(message), fds)

    def send_bytes(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Sends a message that has been pickled."""
        head = HEAD.pack(len(payload), len(fds))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            try:
                self.socket.sendmsg([head], rights)  # descriptors travel with the first byte
                self.socket.sendall(payload)
            except OSError as error:
                raise EOFError(f"the other side is gone: {error}") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Waits for one message; the caller owns the descriptors."""
        fds: list[int] = []
        head = self._read(HEAD.size, fds)
        length, _ = HEAD.unpack(head)
        return pickle.loads(self._read(length, fds)), fds

    def _read(self, count: int, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part, ancillary, _, _ = self.socket.recvmsg(min(count - len(data), 1 << 20), 256)
            except OSError as error:
                raise EOFError(f"the other side is gone: {error}") from error
            if not part:
                raise EOFError("the other side is gone")
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    fds.extend(numbers)
            data += part
        return bytes(data)

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()
