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
_UNTOLD = {"mpeg", "mpegts", "avi", "vp8"}
_TOLERANCE = Fraction(1, 10)  # seconds by which the end of a whole video may differ from its stated end
_PACKETS = (188, 192, 204)  # bytes of a packet of MPEG-TS
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
    """

    address: str
    stamps: np.ndarray
    keys: np.ndarray
    unit: Fraction = Fraction(1)
    start: Fraction = Fraction(0)
    fault: str = ""

    are_decoded = True
    of_videos = True

    def __len__(self) -> int:
        return len(self.stamps) + bool(self.fault)

    def name(self, row: int) -> str:
        """Return VIDEO#SECONDS, such as a.mp4#12.480; VIDEO for the frames that cannot be read."""
        if row == len(self.stamps):
            return self.address
        digits = 3 if self.unit * int(np.diff(self.stamps).min(initial=10**6)) >= Fraction(1, 1000) else 6
        return f"{self.address}#{float(int(self.stamps[row]) * self.unit - self.start):.{digits}f}"

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
    are_keys, end, problem = _read_packets(container, start)
    if not problem and _is_cut(container, end, sorted(are_keys.keys() - {None})):
        problem = "it is cut short"
    elif not problem and not _are_fragments_whole(address, container.size):
        problem = "it is damaged"
    if None in are_keys or {container.format.name, stream.codec_context.name} & _UNTOLD:
        are_keys = {_stamp(frame): frame.key_frame for frame in _Decoder(address).frames}
    if not are_keys:
        raise ValueError(problem or "it has no frames")
    stamps = np.array(sorted(are_keys))
    keys = stamps[[are_keys[stamp] for stamp in stamps.tolist()]]
    frames = VideoFrames(address, stamps, keys, stream.time_base, start)
    if problem:
        frames.fault = f"cannot read all of {address}: {problem}; the last frame that is read is {frames.name(-1)}"
    return frames


def _read_packets(container: InputContainer, end: Fraction) -> tuple[dict[int | None, bool], Fraction, str]:
    """Return time stamp of a packet of the video -> whether it is a keyframe; the `end` in seconds; and the damage."""
    stream, are_keys, problem = container.streams.best("video"), {}, ""
    try:
        for packet in container.demux():
            heartbeat()
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            if packet.is_corrupt:
                problem = "it is damaged or cut short"
            elif packet.size and packet.stream is stream and not packet.is_discard:
                are_keys[packet.pts] = packet.is_keyframe
    except Exception as error:
        problem = reason_of(error)
    return are_keys, end, problem


def _is_cut(container: InputContainer, end: Fraction, stamps: list[int]) -> bool:
    """Return whether a video with frames at `stamps` ends too early, at `end` in seconds."""
    stream, kind = container.streams.best("video"), container.format.name
    stated = Fraction(container.duration or 0, 10**6)
    if kind == "mpegts":  # which states no end, but has packets of one size
        return all(container.size % size for size in _PACKETS)
    if kind.startswith("mov"):
        return any(entry.pos + entry.size > container.size for entry in stream.index_entries)
    if "matroska" not in kind:
        stated += Fraction(container.start_time or 0, 10**6)
    gap = int(np.diff(stamps).max(initial=0)) * stream.time_base
    return "mpeg" not in kind and stated - end > max(2 * gap, _TOLERANCE)


def _are_fragments_whole(address: str, size: int) -> bool:
    """Return whether the boxes of an MP4 with fragments end with the file. FFmpeg ends at a damaged box, unsaid."""
    position, kind, has_fragments = 0, b"ftyp", False
    with open_source(address) as file:
        while position < size and kind.isalnum():
            file.seek(position)
            header = file.read(16)
            kind, length = header[4:8], int.from_bytes(header[:4])
            if length == 1:  # a longer one follows
                length = int.from_bytes(header[8:])
            position += length or size
            has_fragments |= kind == b"moof"
    return position == size or not has_fragments


# ------------------------------------------------------------------------------------------------------------- decoding
def _stamp(frame: VideoFrame) -> int:
    stamp = frame.dts if frame.pts is None else frame.pts
    if stamp is None:
        raise ValueError("its frames have no times; convert it, such as to .mp4")
    return stamp


class _Decoder:
    """An open video. `frames` are the next; `first` and `last` are the time stamps of those read since a seek."""

    def __init__(self, address: str):
        self._address, self._context = address, contextlib.ExitStack()
        self._seek(None)

    def _seek(self, key: int | None) -> None:
        """Go to a keyframe, or to the start."""
        if key is None:
            self._context.close()
            self._container = self._context.enter_context(_opened(self._address))
        else:
            self._container.seek(key, stream=self._container.streams.best("video"))
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

    def find(self, stamp: int, keys: np.ndarray) -> VideoFrame:
        """Return the frame with a time stamp; ValueError if it cannot be decoded. `keys` is as in `VideoFrames`."""
        before = keys[keys <= stamp]
        is_later = self.last is not None and self.last < stamp and (before <= self.last).all()
        if is_later and (frame := self._advance(stamp)):
            return frame
        for key in (*before[:-4:-1].tolist(), None):  # some formats seek to a later frame
            self._seek(key)
            if frame := self._advance(stamp):
                return frame
            if key is not None and self.first is not None and self.first <= key:
                break
        raise ValueError("it cannot be decoded")


@functools.lru_cache(_OPEN_VIDEOS)
def _open_decoder(address: str, process: int, thread: int) -> _Decoder:
    """Return the open video of a thread."""
    return _Decoder(address)


def _turn_upright(frame: VideoFrame) -> np.ndarray:
    """Return a frame as RGB u8[h,w,3], mirrored and turned by multiples of 90° as its display matrix says."""
    pixels = frame.to_ndarray(format="rgb24")
    if matrix := frame.side_data.get("DISPLAYMATRIX"):
        turn = np.frombuffer(matrix, np.int32).reshape(3, 3)[:2, :2]  # where x and y go to
        if abs(turn[0, 1]) > abs(turn[0, 0]):
            pixels, turn = pixels.transpose(1, 0, 2), turn[::-1]
        across, down = turn.diagonal()
        pixels = pixels[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1]
    pixels = np.ascontiguousarray(pixels)
    pixels.flags.writeable = False
    return pixels
