"""A stream socket that carries whole frames and never blocks: what the trainer and the nursery read and write.

A frame is a head (payload bytes, number of descriptors) and its payload; descriptors travel with its first byte. The blocking
`Channel` of a worker speaks the same.
"""

from __future__ import annotations

import array
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

HEAD = struct.Struct("<QI")  # payload bytes, number of descriptors
_READ = 1 << 16
_TURN = 1 << 20  # bytes that one connection may bring before the others have their turn
_LONGEST = 1 << 36  # bytes of a frame; a head that says more is none
_ANCILLARY = 1024  # room for descriptors


class _Frame:
    __slots__ = ("begun", "data", "fds", "sent")

    def __init__(self, payload: bytes, fds: Sequence[int], begun: Callable[[], None] | None) -> None:
        self.data = memoryview(HEAD.pack(len(payload), len(fds)) + payload)
        self.fds, self.begun, self.sent = fds, begun, 0


class Stream:
    """One end of such a socket. One thread calls `flush` and `receive`; any thread may `put`.

    `put` only appends, so an interrupt in its thread cannot tear the stream.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._out: deque[_Frame] = deque()
        self._in = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def put(self, payload: bytes, fds: Sequence[int] = (), begun: Callable[[], None] | None = None) -> None:
        """Appends a frame to what `flush` sends.

        Args:
          payload: its bytes.
          fds: descriptors that the receiver gets duplicates of; they must stay open until `begun`.
          begun: called by the flushing thread when the first byte, and with it the descriptors, has been sent.
        """
        self._out.append(_Frame(payload, fds, begun))

    def has_output(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    def flush(self) -> None:
        """Sends what the socket takes now.

        Raises:
          EOFError: the other side is gone.
        """
        while self._out:
            frame = self._out[0]
            rights = []
            if frame.fds and not frame.sent:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))]
            try:
                sent = self.socket.sendmsg([frame.data[frame.sent :]], rights)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError(f"the other side is gone: {error}") from error
            first, frame.sent = not frame.sent, frame.sent + sent
            if first and frame.begun is not None:
                frame.begun()
            if frame.sent == len(frame.data):
                self._out.popleft()

    def receive(self) -> Iterator[tuple[bytes, list[int]]]:
        """Yields the frames that are complete now, with their descriptors, which the caller owns.

        A descriptor for which this process has no room left is -1; frames have one at most.

        Raises:
          EOFError: the other side is gone, and all that it said has been yielded.
        """
        ended: EOFError | None = None
        taken = 0
        while ended is None and taken < _TURN:
            try:
                part, ancillary, flags, _ = self.socket.recvmsg(_READ, _ANCILLARY)
            except BlockingIOError:
                break
            except OSError as error:
                ended = EOFError(f"the other side is gone: {error}")
                break
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    self._fds.extend(numbers)
            if flags & socket.MSG_CTRUNC:  # no room for it in this process
                self._fds.append(-1)
            if not part:
                ended = EOFError("the other side is gone")
            taken += len(part)
            self._in += part
        yield from self._frames()
        if ended is not None:
            raise ended

    def _frames(self) -> Iterator[tuple[bytes, list[int]]]:
        at = 0
        while len(self._in) - at >= HEAD.size:
            length, count = HEAD.unpack_from(self._in, at)
            if length > _LONGEST or count > 1:
                raise ValueError(f"expected a frame of at most {_LONGEST} bytes, found one of {length} and {count} descriptors")
            end = at + HEAD.size + length
            if len(self._in) < end:
                break
            payload = bytes(memoryview(self._in)[at + HEAD.size : end])
            fds, self._fds = self._fds[:count], self._fds[count:]
            at = end
            yield payload, fds
        if at:
            del self._in[:at]

    def close(self) -> None:
        """Closes this end; what waits to be sent is dropped, and descriptors that wait with it are let go by `begun`."""
        for frame in self._out:
            if frame.fds and frame.begun is not None and not frame.sent:
                frame.begun()
        self._out.clear()
        self.socket.close()
