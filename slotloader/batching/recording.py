"""Videos of a slot: frames are taken from the batches that the consumer receives anyway, and encoded in a thread.

A frame is taken when a batch with the slot is handed out, while its rows stand still; the consumer's loop goes on, at its own
pace. A loader that records nothing pays for one look at an empty list per batch.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import queue
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slotloader.arguments import require_count
from slotloader.batching.batches import Batch
from slotloader.errors import WorkerDied
from slotloader.records import values
from slotloader.records.specs import Array, Kind, leaves, show_path, show_value
from slotloader.records.step_type import StepType
from slotloader.table.slots import Table

_QUEUE = 256  # frames that may wait to be encoded; then the consumer waits
_STUCK = 20.0  # seconds that the consumer waits for an encoder before it gives the recording up
_IDLE = 0.5  # seconds between an encoder's looks whether more will come
_CLOSE_TIMEOUT = 60.0  # seconds that `close` gives the encoder
_SMALLEST = 8  # pixels; what is smaller is not taken for an image unless it is named
_NEEDS = {".gif": ("PIL", "Pillow"), ".mp4": ("imageio_ffmpeg", "imageio-ffmpeg")}

log = logging.getLogger("slotloader")

Pick = Callable[[Array], Array]


class Ask(Protocol):
    """`loader.call` or `loader.get_attr`."""

    def __call__(self, name: str, *, slots: Sequence[int]) -> list[Any]:
        """One answer per slot."""


class VideoRecording:
    """A video that is being made; `loader.record_video` makes it. Close it, or use it as a context manager, to have the file.

    Args:
      table: the slot table.
      running: the recordings that the receivers show batches to; it takes itself out when it is done.
      get_attr, call: of the loader.
      slot, path, frames, episodes, fps, key, render: see `loader.record_video`.

    Attributes:
      slot: whose video it is.
      path: the file, complete after `close`.
      num_frames: frames taken so far.
      num_episodes: episodes that ended while it ran.
      done: nothing more is taken, since the number asked for has been reached, or by `close`, or by an error.
    """

    def __init__(
        self,
        table: Table,
        running: list[VideoRecording],
        get_attr: Ask,
        call: Ask,
        slot: int,
        path: str | PathLike[str],
        frames: int | None,
        episodes: int | None,
        fps: float,
        key: Any,
        render: bool | None,
    ) -> None:
        self.path = Path(path)
        encode = _encoder_for(self.path)
        if frames is not None and episodes is not None:
            raise ValueError(f"record_video: expected one of frames and episodes, found frames={frames}, episodes={episodes}")
        frames, episodes = (require_count(name, n, optional=True) for name, n in (("frames", frames), ("episodes", episodes)))
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 100:
            raise ValueError(f"fps: expected a number above 0 and at most 100, found {fps!r}")
        self.slot, self._table, self._running, self._get_attr, self._call = slot, table, running, get_attr, call
        self._frames, self._episodes = frames, episodes
        self._grab = self._source(key, render)
        self._waiting = episodes is not None  # for the first record of an episode
        self._passed = 0  # records that came meanwhile
        self._sequence = -1  # of the record taken last: one that is given back comes again
        self.num_frames = self.num_episodes = 0
        self.done = self._closed = False
        self._error: BaseException | None = None
        self._shape: tuple[int, ...] | None = None
        self._queue: queue.Queue[Array | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._encode, args=(encode, fps), name="slotloader-recording", daemon=True)
        self._thread.start()

    # Where frames come from.

    def _source(self, key: Any, render: bool | None) -> Callable[[int], Array | None]:
        if key is not None and render:
            raise ValueError(f"record_video: expected key= or render=True, found both (key={key!r})")
        if render or (render is None and key is None and not self._images()):
            self._require_rendering()
            return self._rendered
        column, pick = self._named(key) if key is not None else self._largest()
        return lambda step_type: np.array(pick(column[self.slot]))

    def _columns(self) -> Iterator[tuple[Any, Array]]:
        """The array leaves of the observation with their columns."""
        at = 0
        for leaf in leaves(self._table.layout.observation):
            if leaf.kind is Kind.ARRAY:
                yield leaf, self._table.observation[at]
            at += len(values.parts(leaf))

    def _images(self) -> list[tuple[int, Array, Pick]]:
        """Leaves that look like images: number of pixels, column, and how to cut out the image."""
        found = []
        for leaf, column in self._columns():
            pick = picker(leaf.shape) if leaf.dtype == np.uint8 else None
            if pick is not None:
                height, width = pick(np.zeros(leaf.shape, np.uint8)).shape[:2]
                if min(height, width) >= _SMALLEST:
                    found.append((height * width, column, pick))
        return found

    def _largest(self) -> tuple[Array, Pick]:
        images = self._images()
        if not images:
            raise ValueError(
                f"record_video: expected an observation with an image, uint8 (H, W[, 1|3|4]), found {self._show_leaves()}"
            )
        _, column, pick = max(images, key=lambda image: image[0])
        return column, pick

    def _named(self, key: Any) -> tuple[Array, Pick]:
        path = key if isinstance(key, tuple) else (key,)
        for leaf, column in self._columns():
            if leaf.path[1:] == path:
                pick = picker(leaf.shape) if leaf.dtype == np.uint8 else None
                if pick is None:
                    raise ValueError(f"{show_path(leaf.path)}: expected an image, uint8 (H, W[, 1|3|4]), found {leaf}")
                return column, pick
        raise ValueError(f"key: expected one of {self._show_leaves()}, found {key!r}")

    def _show_leaves(self) -> str:
        return ", ".join(f"{show_path(leaf.path)} {leaf}" for leaf, _ in self._columns()) or "no arrays"

    def _require_rendering(self) -> None:
        """Says at once if the env cannot render."""
        try:
            mode = self._get_attr("render_mode", slots=[self.slot])[0]
        except Exception:  # not a gymnasium env: its `render` will show
            return
        if mode != "rgb_array":
            raise ValueError(
                f"record: slot {self.slot}: expected an image among the observations or an env with render_mode='rgb_array', "
                f"found {self._show_leaves()} and render_mode={mode!r}; pass env_kwargs={{'render_mode': 'rgb_array'}}"
            )

    def _rendered(self, step_type: int) -> Array | None:
        if step_type >= StepType.TERMINATION:
            return None  # its env is being reset already, and would show the next episode
        try:
            frame = self._call("render", slots=[self.slot])[0]
        except WorkerDied:  # its record is the last thing it left; a new life will follow
            return None
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or (pick := picker(frame.shape)) is None:
            raise ValueError(f"slot {self.slot}: expected env.render() to return uint8 (H, W, 3), found {show_value(frame)}")
        return np.array(pick(frame))

    # Taking them.

    def see(self, batch: Batch) -> None:
        """Takes a frame if the batch has a new record of the slot; called by the receiver that hands the batch out."""
        rows = np.flatnonzero(batch.env_indices == self.slot)
        if self.done or rows.size == 0 or self._table.sequence[self.slot] == self._sequence:
            return
        self._sequence = int(self._table.sequence[self.slot])
        step_type = int(batch.step_type[rows[0]])
        if self._waiting and step_type != StepType.FIRST:
            self._passed += 1
            return
        self._waiting = False
        try:
            frame = self._grab(step_type)
            if frame is not None:
                self._put(frame)
        except Exception as error:
            self._fail(error)
            return
        self.num_episodes += step_type >= StepType.TERMINATION
        if self.num_frames == self._frames or (self._episodes is not None and self.num_episodes >= self._episodes):
            self.finish()

    def _put(self, frame: Array) -> None:
        if self._shape is None:
            self._shape = frame.shape
        if frame.shape != self._shape:
            raise ValueError(f"slot {self.slot}: expected frames of shape {self._shape}, found {frame.shape}")
        try:
            self._queue.put(frame, timeout=_STUCK)
        except queue.Full:
            raise TimeoutError(f"{self.path}: the encoder has taken no frame for {_STUCK:g} s") from None
        self.num_frames += 1

    def _fail(self, error: BaseException) -> None:
        """The consumer's loop must go on: it is told by the log now, and by `close`."""
        if self._error is None:
            self._error = error
            log.warning("%s: the recording of slot %d has ended: %s", self.path, self.slot, str(error))
        self.finish()

    def _queued(self) -> Iterator[Array]:
        while True:
            try:
                frame = self._queue.get(timeout=_IDLE)
            except queue.Empty:
                if self.done:
                    return
                continue
            if frame is None:
                return
            yield frame

    def _encode(self, encode: Callable[[Path, Iterator[Array], float], None], fps: float) -> None:
        try:
            encode(self.path, self._queued(), fps)
        except Exception as error:
            self._fail(error)
            for _ in self._queued():  # the consumer may be waiting for room
                pass

    # The end.

    def finish(self) -> None:
        """Takes nothing more, without waiting for the file."""
        self.done = True
        with contextlib.suppress(ValueError):  # two threads may come here at once
            self._running.remove(self)
        with contextlib.suppress(queue.Full):  # then it finds that we are done once it has emptied the queue
            self._queue.put_nowait(None)

    def wait(self, timeout: float) -> bool:
        """Waits until the file is complete; False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Takes nothing more and completes the file.

        Raises:
          Exception: why it could not be made, once; the loader is not concerned.
        """
        self.finish()
        if self._closed:
            return
        self._closed = True
        if not self.wait(_CLOSE_TIMEOUT):
            raise TimeoutError(f"{self.path}: still being encoded after {_CLOSE_TIMEOUT:g} s")
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self.num_frames == 0:
            why = f"no record of slot {self.slot} came"
            if self._passed:
                why = f"no episode of slot {self.slot} began within {self._passed} records; run longer or use frames="
            warnings.warn(f"{self.path}: nothing was recorded, {why}", RuntimeWarning, stacklevel=2)

    def __enter__(self) -> VideoRecording:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
            return
        self.finish()
        self.wait(_CLOSE_TIMEOUT)

    def __repr__(self) -> str:
        state = "done" if self.done else "recording"
        return f"VideoRecording({str(self.path)!r}, slot {self.slot}, {self.num_frames} frames, {state})"


def picker(shape: tuple[int, ...]) -> Pick | None:
    """How to cut the newest image, (H, W) or (H, W, 3), out of an array; None if it does not look like one.

    (H, W), channels last or first, 1, 3 or 4 of them (alpha is dropped), and stacks of frames along the first axis or among
    the channels: (4, H, W) is a stack of grey frames, (9, H, W) one of coloured ones.
    """
    if len(shape) == 2:
        return lambda array: array
    if len(shape) == 4:
        inner = picker(shape[1:])
        return None if inner is None else lambda array: inner(array[-1])
    if len(shape) != 3:
        return None
    first, last = shape[0], shape[-1]
    if last in (1, 3, 4) and last <= min(shape[:2]):
        return (lambda array: array[..., 0]) if last == 1 else (lambda array: array[..., :3])
    if first <= min(shape[1:]):
        return (lambda array: array[-1]) if first % 3 else (lambda array: array[-3:].transpose(1, 2, 0))
    if last <= min(shape[:2]):
        return (lambda array: array[..., -1]) if last % 3 else (lambda array: array[..., -3:])
    return None


def _encoder_for(path: Path) -> Callable[[Path, Iterator[Array], float], None]:
    if path.suffix.lower() not in _NEEDS:
        raise ValueError(f"path: expected a file name that ends in .gif or .mp4, found {str(path)!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: expected an existing folder, found {str(path.parent)!r}")
    module, package = _NEEDS[path.suffix.lower()]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{path.suffix} needs {package}; pip install 'slotloader[video]'") from error
    return _write_gif if path.suffix.lower() == ".gif" else _write_mp4


def _write_gif(path: Path, frames: Iterator[Array], fps: float) -> None:
    """Delays are whole hundredths of a second; a frame that equals the last one only lengthens it; 256 colours a frame."""
    from PIL import Image

    def image(frame: Array) -> Any:
        found = Image.fromarray(frame)
        return found if frame.ndim == 2 else found.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)

    images = (image(frame) for frame in frames)
    first = next(images, None)
    if first is not None:
        try:
            first.save(path, save_all=True, append_images=images, duration=10 * max(1, round(100 / fps)), loop=0)
        except OSError as error:
            raise OSError(f"{path}: {error}") from error


def _write_mp4(path: Path, frames: Iterator[Array], fps: float) -> None:
    """H.264; the last row or column is doubled where their number is odd, which the codec does not take."""
    import imageio_ffmpeg

    first = next(frames, None)
    if first is None:
        return
    odd = [(0, side % 2) for side in first.shape[:2]] + [(0, 0)] * (first.ndim - 2)
    height, width = (side + more for side, (_, more) in zip(first.shape[:2], odd, strict=False))
    raw = ["-f", "rawvideo", "-pix_fmt", "gray" if first.ndim == 2 else "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
    coded = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", str(path)]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *raw, "-i", "-", *coded]
    with tempfile.TemporaryFile() as errors:
        # Not by imageio_ffmpeg.write_frames: it runs Python in a fork of this process, whose threads (of jax, say) may hold
        # locks. A session of its own, so that Ctrl-C in a terminal leaves a file that can be played.
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, start_new_session=True)
        with contextlib.suppress(BrokenPipeError), started as process:  # its own words follow
            assert process.stdin is not None
            for frame in itertools.chain([first], frames):
                process.stdin.write(np.pad(frame, odd, "edge").tobytes())
        if started.returncode:
            errors.seek(0)
            raise OSError(
                f"{path}: ffmpeg ended with status {started.returncode}: {errors.read()[-1000:].decode(errors='replace')}"
            )
