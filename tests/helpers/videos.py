"""Small videos, made by PyAV."""

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np

TICKS = 90_000  # per second
STEADY = [3600 * number for number in range(50)]  # 25 frames per second


def picture(number: int, width: int = 64, height: int = 48) -> np.ndarray:
    """An image without symmetry, which differs from number to number."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = 20 * number % 256
    image[: height // 2, :, 1] = 200
    image[:, : width // 4, 2] = 255
    return image


def write_video(
    path: Path,
    stamps: Iterable[int] = STEADY,
    codec: str = "libx264",
    *,
    unit: Fraction = Fraction(1, TICKS),
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    turn: tuple[int, bool] = (0, False),
    sound: float = 0.0,
) -> Path:
    """Write a video with a picture at each time stamp, in units of `unit` seconds.

    `turn` is the rotation in degrees and whether it is mirrored, and `sound` the seconds of silence beside it.
    """
    import av

    with av.open(str(path), "w", options=container or {}) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        stream.time_base = stream.codec_context.time_base = unit
        stream.codec_context.gop_size = 12
        stream.options = options or {}
        if turn != (0, False):
            stream.set_display_rotation(turn[0], hflip=turn[1])
        audio = file.add_stream("aac", rate=44100) if sound else None
        for number, stamp in enumerate(stamps):
            frame = av.VideoFrame.from_ndarray(picture(number), "rgb24")
            frame.pts, frame.time_base = stamp, unit
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if audio:
            frame = av.AudioFrame.from_ndarray(np.zeros((1, int(44100 * sound)), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 44100, 0
            file.mux([*audio.encode(frame), *audio.encode()])
    return path


def cut(path: Path, fraction: float) -> Path:
    """Shorten a file."""
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    return path
