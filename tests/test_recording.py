"""`loader.record`: videos of a slot, decoded again; the consumer's loop does not notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from checks import until
from gymnasium.spaces import Box, Dict, Text
from PIL import Image, ImageSequence
from toys import Camera, Counting

from slotloader import SlotLoader, evaluate, to_numpy
from slotloader.batching.recording import picker

pytestmark = pytest.mark.usefixtures("clean")


def play(loader: Any, batches: int) -> None:
    for _, batch in zip(range(batches), loader, strict=False):
        batch.send([0] * batch.size)


def idle(obs: np.ndarray) -> np.ndarray:
    return np.zeros(len(obs), np.int64)


def gif(path: Path) -> list[np.ndarray]:
    """Its frames (H, W, 3)."""
    with Image.open(path) as image:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def ffmpeg(path: Path) -> tuple[bytes, str]:
    """The decoded video as RGB bytes, and what ffmpeg says of the file."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return ran.stdout, ran.stderr.decode()


def mp4(path: Path) -> list[np.ndarray]:
    """Its frames (H, W, 3)."""
    data, text = ffmpeg(path)
    width, height = map(int, re.findall(r"Video: .*, (\d+)x(\d+)", text)[0])
    return list(np.frombuffer(data, np.uint8).reshape(-1, height, width, 3))


def brightness(frames: list[np.ndarray]) -> list[int]:
    """The mean of each frame; each must be uniform."""
    assert all(np.ptp(frame[..., 0].astype(int)) <= 3 for frame in frames)
    return [round(float(frame.mean())) for frame in frames]


EPISODE = [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("read", [gif, mp4])
def test_a_video_has_every_frame_of_whole_episodes_in_order(how: dict[str, Any], read: Any, tmp_path: Path) -> None:
    path = tmp_path / f"slot.{read.__name__}"
    with SlotLoader(Camera, 3, **how) as loader:
        play(loader, 7)
        with loader.record_video(1, path, episodes=2) as recording:
            while not recording.done:
                play(loader, 1)
            play(loader, 5)
        assert loader.exchange.recordings == []
    assert (recording.num_frames, recording.num_episodes) == (12, 2)
    frames = read(path)
    assert frames[0].shape == (20, 30, 3)
    np.testing.assert_allclose(brightness(frames), EPISODE * 2, atol=2)


def test_a_number_of_frames_and_the_rate_are_kept(tmp_path: Path) -> None:
    with SlotLoader(Camera, 2, backend="inline") as loader:
        one = loader.record_video(0, tmp_path / "one.gif", frames=4, fps=10)
        two = loader.record_video(0, str(tmp_path / "two.mp4"), frames=8, fps=5)
        play(loader, 20)
        assert one.done and two.done
        one.close()
        one.close()
        two.close()
    with Image.open(tmp_path / "one.gif") as image:
        assert (image.n_frames, image.info["duration"], image.info["loop"]) == (4, 100, 0)
    assert len(mp4(tmp_path / "two.mp4")) == 8
    text = ffmpeg(tmp_path / "two.mp4")[1]
    assert " 5 fps" in text and "Duration: 00:00:01.60" in text


def test_a_record_that_is_given_back_is_taken_once(tmp_path: Path) -> None:
    with SlotLoader(Camera, 2, backend="inline") as loader, loader.record_video(1, tmp_path / "a.gif", episodes=1) as recording:
        while not recording.done:
            loader.recv(min_get=2).release()
            batch = loader.recv(min_get=2)
            batch.send([0, 0])
    assert recording.num_frames == 6
    assert brightness(gif(tmp_path / "a.gif")) == EPISODE


def test_it_works_through_an_adapter_a_share_and_an_evaluation(tmp_path: Path) -> None:
    with SlotLoader(Camera, 4, backend="thread") as loader:
        _, second = loader.split(2)
        with to_numpy(second) as batches, loader.record_video(2, tmp_path / "a.gif", episodes=1) as recording:
            batches.run(idle, episodes=6)
            assert recording.done
        with loader.record_video(3, tmp_path / "b.mp4") as recording:
            evaluate(second, idle, episodes=2)
        assert recording.num_episodes == 1
    assert brightness(gif(tmp_path / "a.gif")) == EPISODE
    assert brightness(mp4(tmp_path / "b.mp4"))[-6:] == pytest.approx(EPISODE, abs=2)


# What is shown.

CAMS = Dict(
    {
        "state": Box(0, 255, (6,), np.uint8),
        "small": Box(0, 255, (9, 9), np.uint8),
        "cam": Box(0, 255, (16, 18, 3), np.uint8),
        "html": Text(20),
    }
)


class Cams(Camera):
    """`Camera` with several leaves."""

    def __init__(self) -> None:
        super().__init__(CAMS)

    def _fill(self, space: Any) -> Any:
        return "text" if isinstance(space, Text) else super()._fill(space)


def test_a_picture_with_an_odd_number_of_pixels_can_be_encoded(tmp_path: Path) -> None:
    with (
        SlotLoader(partial(Camera, Box(0, 255, (3, 21, 33), np.uint8)), 1, backend="inline") as loader,
        loader.record_video(0, tmp_path / "a.mp4", frames=3),
        loader.record_video(0, tmp_path / "a.gif", frames=3),
    ):
        play(loader, 4)
    assert [frame.shape for frame in mp4(tmp_path / "a.mp4")] == [(22, 34, 3)] * 3
    assert [frame[5, 5].tolist() for frame in gif(tmp_path / "a.gif")] == [[t, t + 1, t + 2] for t in (0, 10, 20)]


def test_the_largest_image_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    with SlotLoader(Cams, 2, backend="inline") as loader:
        with (
            loader.record_video(0, tmp_path / "a.gif", frames=1),
            loader.record_video(0, tmp_path / "b.gif", episodes=1, key="small"),
        ):
            play(loader, 30)
        assert gif(tmp_path / "a.gif")[0].shape == (16, 18, 3)
        assert gif(tmp_path / "b.gif")[0].shape == (9, 9, 3)
        assert brightness(gif(tmp_path / "b.gif")) == EPISODE
        for key, text in (("state", r'obs\["state"\]: expected an image'), ("none", r'key: expected one of .*obs\["cam"\]')):
            with pytest.raises(ValueError, match=text):
                loader.record_video(0, tmp_path / "c.gif", key=key)
        with pytest.raises(ValueError, match="key= or render=True"):
            loader.record_video(0, tmp_path / "c.gif", key="cam", render=True)


@pytest.mark.parametrize(
    ("shape", "image", "newest"),
    [
        ((84, 90), (84, 90), None),
        ((84, 90, 1), (84, 90), None),
        ((84, 90, 3), (84, 90, 3), None),
        ((84, 90, 4), (84, 90, 3), None),
        ((1, 84, 90), (84, 90), 0),
        ((3, 84, 90), (84, 90, 3), None),
        ((4, 84, 90), (84, 90), 3),
        ((9, 84, 90), (84, 90, 3), 6),
        ((84, 90, 2), (84, 90), None),
        ((84, 90, 12), (84, 90, 3), None),
        ((4, 84, 90, 3), (84, 90, 3), 3),
        ((4, 84, 90, 1), (84, 90), 3),
        ((4, 3, 84, 90), (84, 90, 3), 3),
        ((7,), None, None),
        ((20, 3, 20), None, None),
        ((2, 2, 2, 2, 2), None, None),
    ],
)
def test_the_newest_image_is_cut_out_of_any_layout(shape: tuple[int, ...], image: Any, newest: int | None) -> None:
    pick = picker(shape)
    if image is None:
        assert pick is None
        return
    obs = np.zeros(shape, np.uint8)
    obs[...] = np.reshape(np.arange(shape[0]), (-1,) + (1,) * (len(shape) - 1))  # the first axis counts
    found = pick(obs)
    assert found.shape == image
    if newest is not None:
        assert found.flat[0] == newest


def test_rendered_frames_are_taken_where_no_observation_is_an_image(how: dict[str, Any], tmp_path: Path) -> None:
    space = Box(0, 255, (3,), np.uint8)
    with SlotLoader(partial(Camera, space, render_mode="rgb_array"), 2, **how) as loader:
        with loader.record_video(1, tmp_path / "a.gif", episodes=2) as recording:
            while not recording.done:
                play(loader, 1)
        assert recording.num_frames == 10  # not those of the last records, whose envs are being reset
    frames = gif(tmp_path / "a.gif")
    assert frames[0].shape == (24, 32, 3)
    assert [int(frame[0, 0, 0]) for frame in frames] == [100, 110, 120, 130, 140] * 2


def test_rendering_can_be_asked_for(tmp_path: Path) -> None:
    with (
        SlotLoader(partial(Camera, render_mode="rgb_array"), 1, backend="inline") as loader,
        loader.record_video(0, tmp_path / "a.mp4", frames=3, render=True),
    ):
        play(loader, 4)
    assert mp4(tmp_path / "a.mp4")[0].shape == (24, 32, 3)


# What goes wrong.


class BrokenRender(Camera):
    """Renders twice, then raises."""

    def render(self) -> Any:
        if self.t == 2:
            raise RuntimeError("no display")
        return super().render()


def test_an_error_ends_the_recording_and_not_the_loop(
    how: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SlotLoader(partial(BrokenRender, render_mode="rgb_array"), 2, **how) as loader:
        recording = loader.record_video(0, tmp_path / "a.gif", render=True)
        play(loader, 30)
        assert recording.done and loader.exchange.recordings == []
        assert "a.gif: the recording of slot 0 has ended" in caplog.text
        with pytest.raises(Exception, match="no display"):
            recording.close()
        recording.close()
    assert len(gif(tmp_path / "a.gif")) == 2  # what there was is kept


def test_an_encoder_that_fails_does_not_stop_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = []

    def broken(path: Path, frames: Any, fps: float) -> None:
        next(frames)
        until(recordings[0]._queue.full)  # the consumer is waiting for room, or about to
        raise OSError("no space left")

    monkeypatch.setattr("slotloader.batching.recording._write_gif", broken)
    with SlotLoader(Camera, 1, backend="inline") as loader:
        recording = loader.record_video(0, tmp_path / "a.gif")
        recordings.append(recording)
        began = time.monotonic()
        play(loader, 700)  # more than fit into the queue
        assert time.monotonic() - began < 15
        with pytest.raises(OSError, match="no space left"):
            recording.close()


def test_what_ffmpeg_says_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").mkdir()
    with SlotLoader(Camera, 1, backend="inline") as loader:
        recording = loader.record_video(0, tmp_path / "a.mp4")
        play(loader, 30)
        with pytest.raises(OSError, match=r"a\.mp4: ffmpeg ended with status .*directory"):
            recording.close()


def test_an_encoder_is_started_without_a_fork_that_runs_python(tmp_path: Path) -> None:
    """Hooks at a fork tell: those of jax warn of a deadlock, our own would take the loader for another process's."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    with SlotLoader(Camera, 1, backend="inline") as loader, loader.record_video(0, tmp_path / "a.mp4", frames=2):
        play(loader, 4)
    assert forks == [] and len(mp4(tmp_path / "a.mp4")) == 2


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with SlotLoader(Camera, 2, backend="inline") as loader:
        for slot, path, options, error, text in (
            (2, "a.gif", {}, ValueError, "slots: expected 0 to 1, found"),
            (0, "a.avi", {}, ValueError, r"ends in \.gif or \.mp4, found .*a\.avi"),
            (0, "none/a.gif", {}, FileNotFoundError, "expected an existing folder"),
            (0, "a.gif", {"frames": 0}, ValueError, "frames: expected an integer of at least 1 or None, found 0"),
            (0, "a.gif", {"frames": 1, "episodes": 1}, ValueError, "expected one of frames and episodes"),
            (0, "a.gif", {"fps": 0}, ValueError, "fps: expected a number above 0"),
            (0, "a.gif", {"render": True}, ValueError, r"render_mode=None; pass env_kwargs=\{'render_mode': 'rgb_array'\}"),
        ):
            with pytest.raises(error, match=text):
                loader.record_video(slot, tmp_path / path, **options)
        assert loader.exchange.recordings == []
    with SlotLoader(Counting, 1, backend="inline") as loader:
        with pytest.raises(
            ValueError, match=r"expected an image among the observations or an env with render_mode='rgb_array'"
        ):
            loader.record_video(0, tmp_path / "a.gif")
        with pytest.raises(ValueError, match="expected an observation with an image"):
            loader.record_video(0, tmp_path / "a.gif", render=False)


@pytest.mark.parametrize(
    ("name", "module", "package"), [("a.gif", "PIL", "Pillow"), ("a.mp4", "imageio_ffmpeg", "imageio-ffmpeg")]
)
def test_a_missing_encoder_names_the_extra(
    name: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    missing = pytest.raises(ImportError, match=rf"needs {package}; pip install 'slotloader\[video\]'")
    with SlotLoader(Camera, 1, backend="inline") as loader, missing:
        loader.record_video(0, tmp_path / name)


def test_nothing_recorded_is_said_and_closing_the_loader_completes_files(how: dict[str, Any], tmp_path: Path) -> None:
    with SlotLoader(Camera, 2, **how) as loader:
        recording = loader.record_video(0, tmp_path / "a.gif")
        with pytest.warns(RuntimeWarning, match="nothing was recorded, no record of slot 0 came"):
            recording.close()
        assert not (tmp_path / "a.gif").exists()
        forgotten = loader.record_video(0, tmp_path / "b.gif")
        play(loader, 20)
    assert forgotten.done and len(gif(tmp_path / "b.gif")) == forgotten.num_frames > 5
