"""The frames of videos are those of PyAV at the same times, in any order."""

import pickle
import sys
from fractions import Fraction

import numpy as np
import pytest
from helpers.videos import STEADY, TICKS, cut, write_video

from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.containers.video import find_moment, is_video, open_video
from mlmoe_jax.data.decoding import BadImage, Decoding
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError

UNEVEN = [0, *(int(TICKS * (0.2 * k + 3 * (k > 20))) for k in range(1, 40))]
FRAMES = {"unit": Fraction(1, 25)}
KINDS = {
    "b_frames.mp4": {},
    "uneven.mp4": {"stamps": UNEVEN},
    "uneven.mkv": {"stamps": UNEVEN},
    "late.mkv": {"stamps": [stamp + 3 * TICKS for stamp in STEADY]},
    "sound.mp4": {"sound": 3.0},
    "mpeg2.ts": {"stamps": range(50), "codec": "mpeg2video", **FRAMES},
    "h264.ts": {},
    "old.avi": {"stamps": range(50), "codec": "mpeg4", **FRAMES},
    "vp8.webm": {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "open_gop.mp4": {"options": {"x264-params": "open-gop=1:keyint=10:bframes=3"}},
    "refreshed.mp4": {"options": {"x264-params": "intra-refresh=1:keyint=10"}},
    "deep.mkv": {"codec": "ffv1", "pixels": "yuv420p10le"},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
}


def frames_of(path, every=None):
    return open_video(str(path), Usage("a", "file"), every)


def times(frames):
    return [find_moment(frames.name(row)).time for row in range(len(frames))]


@pytest.mark.parametrize("name", KINDS)
def test_frames_are_those_of_pyav_in_any_order(name, tmp_path):
    av = pytest.importorskip("av")
    path = write_video(tmp_path / name, **KINDS[name])
    frames = pickle.loads(pickle.dumps(frames_of(path)))
    with av.open(str(path)) as video:
        start = video.start_time / 1e6
        expected = [(frame.time - start, frame.to_ndarray(format="rgb24")) for frame in video.decode(video=0)]
    assert len(frames) == len(expected) > 30
    np.testing.assert_allclose(times(frames), [time for time, _ in expected], atol=5e-4)
    for row in (*range(len(frames)), *np.random.default_rng(0).permutation(len(frames)).tolist()):
        np.testing.assert_array_equal(frames.read(row), expected[row][1])


def test_times_begin_with_the_sound_before_the_frames(tmp_path):
    pytest.importorskip("av")
    path = write_video(tmp_path / "a.mp4", [stamp + TICKS // 2 for stamp in STEADY], sound=2.5)
    assert times(frames_of(path))[:2] == [0.5, 0.54]


def test_every_takes_the_first_frame_at_or_after_each_multiple(tmp_path):
    pytest.importorskip("av")
    steady = write_video(tmp_path / "a.mp4")
    assert times(frames_of(steady, Fraction(1, 2))) == [0, 0.52, 1, 1.52]
    assert times(frames_of(steady, Fraction("0.04"))) == times(frames_of(steady))
    assert times(frames_of(steady, Fraction(60))) == [0]
    uneven = write_video(tmp_path / "b.mp4", UNEVEN)
    assert times(frames_of(uneven, Fraction(1)))[:6] == [0, 1, 2, 3, 4, 7.2]  # not 7.2 three times


def test_times_of_close_frames_have_more_digits(tmp_path):
    pytest.importorskip("av")
    frames = frames_of(write_video(tmp_path / "a.mp4", range(0, 500, 45)))
    assert frames.name(1) == f"{tmp_path}/a.mp4#0.000500"


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("angle", [0, 90, 180, 270])
def test_frames_are_upright(angle, mirrored, tmp_path):
    pytest.importorskip("av")
    plain = frames_of(write_video(tmp_path / "a.mp4", STEADY[:3])).read(0)
    turned = frames_of(write_video(tmp_path / "b.mp4", STEADY[:3], turn=(angle, mirrored))).read(0)
    expected = np.rot90(plain, angle // 90)
    np.testing.assert_array_equal(turned, expected[:, ::-1] if mirrored else expected)


@pytest.mark.parametrize(
    ("name", "container"),
    [("a.mp4", {"movflags": "faststart"}), ("a.mkv", {}), ("a.avi", {}), ("a.ts", {})],
)
def test_a_truncated_video_has_the_frames_before_its_end_and_an_error(name, container, tmp_path):
    pytest.importorskip("av")
    kind = KINDS["mpeg2.ts" if name == "a.ts" else "old.avi"]
    whole = frames_of(write_video(tmp_path / f"whole_{name}", **kind, container=container))
    frames = frames_of(cut(write_video(tmp_path / name, **kind, container=container), 0.8))
    read = []
    for row in range(len(frames)):
        if not frames.problem(row):
            np.testing.assert_array_equal(frames.read(row), whole.read(row))
            read.append(row)
    assert len(whole) == 50
    assert 20 < len(read) < 50
    assert read == list(range(len(read)))
    assert frames.name(len(frames) - 1) == f"{tmp_path}/{name}"
    with pytest.raises(BadImage, match=f"cannot read all of {tmp_path}/{name}: it is .*cut short; the last frame that"):
        frames.read(len(frames) - 1)


def test_frames_behind_a_damaged_fragment_are_an_error(tmp_path):
    pytest.importorskip("av")
    path = write_video(tmp_path / "a.mp4", **KINDS["fragments.mp4"])
    content = path.read_bytes()
    at = content.rindex(b"moof") - 4
    path.write_bytes(content[:at] + bytes(16) + content[at + 16 :])
    frames = frames_of(path)
    assert 30 < len(frames) < 50
    assert "it is damaged; the last frame that is read is" in frames.problem(len(frames) - 1)
    assert not any(map(frames.problem, range(len(frames) - 1)))


def test_frames_after_damage_are_errors_until_a_keyframe(tmp_path):
    pytest.importorskip("av")
    path = write_video(tmp_path / "a.mp4", range(50), "mpeg4", container={"movflags": "faststart"}, **FRAMES)
    whole = [frame.copy() for frame in map(frames_of(path).read, range(50))]
    content = bytearray(path.read_bytes())
    at = content.index(b"mdat") + 4 + 3 * (len(content) - content.index(b"mdat")) // 10
    content[at : at + 400] = bytes(400)
    (tmp_path / "b.mp4").write_bytes(content)
    frames = frames_of(tmp_path / "b.mp4")
    bad = [row for row in range(50) if frames.problem(row)]
    assert 0 < len(bad) < 40
    assert all(np.array_equal(frames.read(row), whole[row]) for row in range(36, 50))
    assert "cannot be decoded" in frames.problem(bad[0])


@pytest.mark.parametrize("content", [b"", b"text", b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n"])
def test_a_video_that_cannot_be_read_is_one_unreadable_image(content, tmp_path):
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_bytes(content)
    frames = open_images(str(tmp_path / "a.mp4"), Usage("a", "file"))
    assert len(frames) == 1
    assert frames.name(0) == str(tmp_path / "a.mp4")
    assert frames.problem(0).startswith(f"cannot read {tmp_path}/a.mp4 as a video: ")


def test_a_large_frame_is_refused(tmp_path):
    pytest.importorskip("av")
    frames = frames_of(write_video(tmp_path / "a.mp4", STEADY[:2]))
    assert "more than 100 pixels" in frames.problem(0, Decoding(most_pixels=100))


def test_pyav_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").touch()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"a\.mp4 is a video, which needs the package av; run `pip install av`"):
        frames_of(tmp_path / "a.mp4")


def test_names_tell_videos_and_times():
    assert is_video("A.MP4")
    assert not is_video("a.jpg")
    assert find_moment("x#y/a.mp4#12.480") == ("x#y/a.mp4", 12.48)
    assert find_moment("a.mov") == ("a.mov", None)
    assert find_moment("a.parquet#12") is find_moment("a.mp4.jpg") is None
