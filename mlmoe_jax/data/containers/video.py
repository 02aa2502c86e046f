"""The frames of a video, read by PyAV (the extra `video`), with random access to each.

Opening a video reads the time stamps of its frames, without decoding them where the container states one per frame. A
frame is decoded from the keyframe before it on, or from the frame that was read last. Times are in seconds from the
start of the video, as players show them. Frames are turned upright. Interlaced frames and the shape of pixels stay as
they are.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlmoe_jax.data.containers.reach import open_source
from mlmoe_jax.data.decoding import STRICT, BadImage, Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.progress import heartbeat

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

VIDEOS = (
    *(".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2", ".mkv", ".webm", ".avi", ".divx", ".mpg", ".mpeg", ".vob"),
    *(".ts", ".mts", ".m2ts", ".wmv", ".asf", ".flv", ".ogv", ".mxf", ".dv"),
)
_NAME = re.compile(rf"(.+(?:{'|'.join(map(re.escape, VIDEOS))}))(?:#(-?\d+\.\d+))?", re.IGNORECASE | re.DOTALL)
# Playlists, which name other files and addresses, are not among the formats.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg,mxf,dv"
# Packets do not tell the frames: they may have half a frame (mpeg), no time of their own (avi), or no frame (vp8).
_UNTOLD = ("mpeg", "mpegts", "avi", "vp8")
_TOLERANCE = Fraction(1, 10)  # seconds by which the end of a whole video may differ from its stated end
_OPEN_VIDEOS = 32


def is_video(name: str) -> bool:
    """Return whether a path or an address has the suffix of a video."""
    return name.lower().endswith(VIDEOS)


class Moment(NamedTuple):
    """The path of a video, and the time of a frame in seconds; the time is None for the whole video."""

    video: str
    time: float | None


def find_moment(name: str) -> Moment | None:
    """Return which frame has a name of `VideoFrames.name`; None if it is the name of an image."""
    found = _NAME.fullmatch(name)
    return found and Moment(found[1], float(found[2]) if found[2] else None)


@dataclass(eq=False)
class VideoFrames(Images):
    """The frames of a video.

    Attributes:
      stamps: i64[n], the time stamps of the n frames, in units of `unit` seconds.
      keys: i64[k], the sorted time stamps of all keyframes.
      start: the time stamp, in seconds, of the start of the video.
      fault: why further frames cannot be read, which is one more image that cannot be read; "" if there are none.
      end: the time from which on frames cannot be read, in seconds from the start.
    """

    address: str
    stamps: np.ndarray
    keys: np.ndarray
    unit: Fraction = Fraction(1)
    start: Fraction = Fraction(0)
    fault: str = ""
    end: float = 0.0

    are_decoded = True
    of_videos = True

    def __len__(self) -> int:
        return len(self.stamps) + bool(self.fault)

    def name(self, row: int) -> str:
        """Return VIDEO#SECONDS, such as a.mp4#12.480; VIDEO if it has no frames."""
        if not len(self.stamps):
            return self.address
        digits = 3 if self.unit * int(np.diff(self.stamps).min(initial=10**6)) >= Fraction(1, 1000) else 6
        return f"{self.address}#{self._time(row):.{digits}f}"

    def _time(self, row: int) -> float:
        return self.end if row == len(self.stamps) else float(int(self.stamps[row]) * self.unit - self.start)

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        if row == len(self.stamps):
            raise BadImage(self.fault)
        try:
            frame = _open_decoder(self.address, os.getpid(), threading.get_ident()).find(self.stamps[row], self.keys)
            if frame.width * frame.height > decoding.most_pixels:
                raise ValueError(f"it has more than {decoding.most_pixels:,} pixels")
            return _turn_upright(frame)
        except Exception as error:  # decoders raise errors of many types for damaged data
            raise BadImage(f"cannot read {self.name(row)} as a frame of a video: {reason_of(error)}") from error


def open_video(address: str, usage: Usage, every: Fraction | None = None) -> VideoFrames:
    """Return the frames of a video at a path or an address. A video that cannot be read is one unreadable image.

    With `every`, in seconds, the frames are the first at or after each multiple of it. Raises UserError if PyAV is not
    installed.
    """
    usage.unit = "row"
    try:
        with _opened(address) as container:
            frames = _read_stamps(address, container)
    except UserError:
        raise
    except Exception as error:
        problem = f"cannot read {address} as a video: {reason_of(error)}"
        return VideoFrames(address, np.zeros(0, np.int64), np.zeros(0, np.int64), fault=problem)
    if every:
        passed = [(int(stamp) * frames.unit - frames.start) // every for stamp in frames.stamps]  # multiples
        frames.stamps = frames.stamps[np.diff(passed, prepend=passed[:1] and passed[0] - 1) > 0]
    return frames


@contextlib.contextmanager
def _opened(address: str) -> Iterator[InputContainer]:
    try:
        import av  # the extra video
    except ImportError as error:
        raise UserError(f"{address} is a video, which needs the package av; run `pip install av`") from error
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": ""}
    with open_source(address) as file, av.open(file, options=options, metadata_errors="replace") as container:
        if container.streams.best("video") is None:
            raise ValueError("it has no video")
        yield container


def _read_stamps(address: str, container: InputContainer) -> VideoFrames:
    """Return all frames of a video, or those before the damage."""
    stream, start = container.streams.best("video"), Fraction(container.start_time or 0, 10**6)
    packets, end, problem = [], start, ""
    try:
        for packet in container.demux():
            heartbeat()
            if packet.dts is None and not packet.size:  # the end of a stream
                continue
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            if packet.is_corrupt:
                problem = "it is damaged or cut short"
            elif packet.stream is stream and not packet.is_discard:
                packets.append((packet.pts, packet.is_keyframe))
    except Exception as error:
        problem = reason_of(error)
    times = sorted(stamp * stream.time_base for stamp, _ in packets if stamp is not None)
    gap = max(map(operator.sub, times[1:], times), default=Fraction(0))
    problem = problem or _find_cut(container, end, gap)
    kinds = {container.format.name, stream.codec_context.name}
    if kinds & set(_UNTOLD) or any(stamp is None for stamp, _ in packets):
        packets = [(_stamp(frame), frame.key_frame) for frame in _Decoder(address).frames]
    if not packets:
        raise ValueError(problem or "it has no frames")
    stamps = np.unique([stamp for stamp, _ in packets])
    keys = np.unique([stamp for stamp, is_key in packets if is_key]).astype(np.int64)
    length = float(end - start)
    problem = problem and f"cannot read all of {address}: {problem}; the frames before {length:.3f} s are read"
    return VideoFrames(address, stamps, keys, stream.time_base, start, problem, length)


def _find_cut(container: InputContainer, end: Fraction, gap: Fraction) -> str:
    """Return why a video ends too early at `end`; "" if it does not. `gap` is the longest time between two frames."""
    stream, stated = container.streams.best("video"), Fraction(container.duration or 0, 10**6)
    if container.format.name.startswith("mov"):
        is_cut = any(entry.pos + entry.size > container.size for entry in stream.index_entries)
    else:
        if "matroska" not in container.format.name:
            stated += Fraction(container.start_time or 0, 10**6)
        is_cut = "mpeg" not in container.format.name and stated - end > max(2 * gap, _TOLERANCE)
    return "it is cut short" if is_cut else ""


# ------------------------------------------------------------------------------------------------------------- decoding
def _stamp(frame: VideoFrame) -> int:
    stamp = frame.dts if frame.pts is None else frame.pts
    if stamp is None:
        raise ValueError("its frames have no times; convert it, such as to .mp4")
    return stamp


class _Decoder:
    """An open video. `frames` are the next; `first` and `last` are the time stamps of those read since a seek."""

    def __init__(self, address: str):
        self._address = address
        self._open()

    def _open(self) -> None:
        self._context = contextlib.ExitStack()
        self._container = self._context.enter_context(_opened(self._address))
        self._restart()

    def _restart(self) -> None:
        self.frames, self.first, self.last = self._decode(), None, None

    def _decode(self) -> Iterator[VideoFrame]:
        """Yield frames; from a damaged packet on, none that may refer to it, up to the next keyframe."""
        sound, damaged = -math.inf, set()  # the time stamp from which on frames are sound, and those that are not
        for packet in self._container.demux(self._container.streams.best("video")):
            if packet.is_corrupt:
                sound = math.inf
            elif packet.is_keyframe and sound == math.inf:
                sound = packet.pts
            if packet.pts is not None and packet.pts < sound:
                damaged.add(packet.pts)
            try:
                frames = packet.decode()
            except ValueError:
                sound = math.inf
                continue
            yield from (frame for frame in frames if frame.pts not in damaged)

    def _advance(self, stamp: int) -> VideoFrame | None:
        """Return the next frame with a time stamp; None if there is none before later frames."""
        for frame in self.frames:
            self.last = _stamp(frame)
            self.first = self.last if self.first is None else self.first
            if self.last >= stamp:
                return frame if self.last == stamp else None
        return None

    def _seek(self, key: int | None) -> None:
        """Go to a keyframe, or to the start."""
        if key is None:
            self._context.close()
            self._open()
        else:
            self._container.seek(key, stream=self._container.streams.best("video"))
            self._restart()

    def find(self, stamp: int, keys: np.ndarray) -> VideoFrame:
        """Return the frame with a time stamp; ValueError if it cannot be decoded. `keys` is as in `VideoFrames`."""
        before = keys[keys <= stamp].tolist()
        if self.last is not None and max(before[-1:], default=self.last) <= self.last < stamp:
            frame = self._advance(stamp)
            if frame:
                return frame
        for key in (*before[:-4:-1], None):  # a keyframe may need frames before it, and some formats seek inexactly
            self._seek(key)
            if frame := self._advance(stamp):
                return frame
            if self.first is not None and key is not None and self.first <= key:
                break
        raise ValueError("it cannot be decoded")


@functools.lru_cache(_OPEN_VIDEOS)
def _open_decoder(address: str, process: int, thread: int) -> _Decoder:
    """Return the open video of a thread."""
    return _Decoder(address)


def _turn_upright(frame: VideoFrame) -> np.ndarray:
    """Return a frame as RGB u8[h,w,3], mirrored and turned by multiples of 90° as its display matrix says."""
    pixels = frame.to_ndarray(format="rgb24")
    matrix = next((data for data in frame.side_data if data.type.name == "DISPLAYMATRIX"), None)
    if matrix is not None:
        (xx, xy), (yx, yy) = np.frombuffer(matrix, np.int32).reshape(3, 3)[:2, :2].tolist()  # yx: from y to x
        is_across = abs(xy) + abs(yx) > abs(xx) + abs(yy)
        across, down = (yx, xy) if is_across else (xx, yy)
        pixels = pixels.transpose(1, 0, 2) if is_across else pixels
        pixels = pixels[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1]
    pixels = np.ascontiguousarray(pixels)
    pixels.flags.writeable = False
    return pixels
