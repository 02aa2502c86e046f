"""The parts of `tools.faults` that drive whole commands from outside: servers, people, and several processes."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import http.client
import io
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tools.faults.program import Ended, Program, Running

Case = tuple[str, str, bool, str]  # part, name, held, observation
ANSWER = 5.0  # seconds in which a request of somebody else has to be answered
END = 8.0  # seconds in which a server has to end after SIGTERM
STRANGER = "127.0.0.2"  # the address of hostile clients; others come from 127.0.0.1
CONFIG = "--config=own_csv:root={},backbone=efficientnet_lite0,resolution=32"


# -------------------------------------------------------------------------------------------------------------- servers
@contextlib.contextmanager
def _server(program: Program, run: Path, descriptors: int = 0) -> Iterator[tuple[Running, int]]:
    """Start a server; yield it and its port once it is ready, and kill it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = program.launch(("--mode=serve", f"--workdir={run}", f"--port={port}"), descriptors=descriptors)
    try:
        started = time.monotonic()
        while "ready: " not in server.text():
            if server.wait(0.2) is not None or time.monotonic() > started + 120:
                raise RuntimeError(f"the server did not start: {server.text()}")
        yield server, port
    finally:
        server.kill()


def _post(port: int, image: bytes, seconds: float) -> str:
    """Send an image to be labeled; return what is wrong with the answer, or ""."""
    started = time.monotonic()
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        client.request("POST", "/predict", image, {"Content-Type": "image/png"})
        status = client.getresponse().status
    except OSError as error:
        return f"no answer after {time.monotonic() - started:.1f} s ({error})"
    finally:
        client.close()
    return "" if status == 200 else f"status {status} after {time.monotonic() - started:.1f} s"


def _stopped(server: Running) -> str:
    """Send SIGTERM to a server; return what is wrong with its end, or ""."""
    server.signal(signal.SIGTERM)
    started = time.monotonic()
    code = server.wait(40)
    seconds = time.monotonic() - started
    if code != 0:
        return f"exit code {code} {seconds:.1f} s after SIGTERM"
    return "" if seconds <= END else f"ended {seconds:.1f} s after SIGTERM"


def many_scans(side: int, scans: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated, so that a small file takes minutes to decode."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "JPEG", quality=1, progressive=True)
    content = buffer.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * scans + content[-2:]


def _attack(
    port: int, content: bytes, *, rest: Callable[[socket.socket], object] | None = None
) -> socket.socket | None:
    """Connect as a stranger and send `content`; then call `rest` with the socket in a thread."""
    attacker = socket.socket()
    attacker.settimeout(60)
    try:
        attacker.bind((STRANGER, 0))
        attacker.connect(("127.0.0.1", port))
        attacker.sendall(content)
    except OSError:  # refused, which is an answer
        attacker.close()
        return None
    if rest is not None:
        threading.Thread(target=_until_closed, args=(attacker, rest), daemon=True).start()
    return attacker


def _until_closed(attacker: socket.socket, rest: Callable[[socket.socket], object]) -> None:
    with contextlib.suppress(OSError):
        while True:
            rest(attacker)
            time.sleep(1)


def _request(body: bytes, length: int) -> bytes:
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/jpeg\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def servers(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Attack a server from one address: another client is answered, and SIGTERM ends the server."""
    image = program.photo.read_bytes()
    scans = {
        f"{count:,} scans of {side} x {side} pixels": many_scans(side, count)
        for side, count in SCANS[: 1 + 3 * (not quick)]
    }

    def poisoned(content: bytes) -> Callable[[int], list]:
        return lambda port: [_attack(port, _request(content, len(content))) for _ in range(4)]

    def slow(port: int) -> list:
        return [_attack(port, _request(b"\xff\xd8", 10**6), rest=lambda s: s.sendall(b"\0")) for _ in range(150)]

    def half(port: int) -> list:
        return [_attack(port, _request(b"\xff\xd8", 10**6)) for _ in range(40)]

    def headers(port: int) -> list:
        return [_attack(port, b"POST /predict HTTP/1.1\r\n", rest=lambda s: s.sendall(b"A: b\r\n")) for _ in range(150)]

    def idle(port: int) -> list:
        return [_attack(port, b"") for _ in range(300 if quick else 1000)]

    attacks: dict[str, tuple[Callable[[int], list], int]] = {
        **{f"four JPEGs of {name}": (poisoned(content), 0) for name, content in scans.items()},
        "150 slow bodies": (slow, 0),
        "40 bodies of which half is sent": (half, 0),
        "150 slow headers": (headers, 0),
        "idle connections": (idle, 256),
    }
    for name, (attack, descriptors) in attacks.items():
        with _server(program, whole, descriptors) as (server, port):
            sockets = attack(port)
            time.sleep(1)
            wrong = [_post(port, image, 4 * ANSWER) for _ in range(3)]
            wrong = [reason for reason in wrong if reason] or _late(port, image)
            wrong.append(_stopped(server))
            for attacker in filter(None, sockets):
                attacker.close()
        reason = "; ".join(filter(None, wrong))
        yield "servers", name, not reason, reason
    for name, content in scans.items():
        path = program.place / "scans.jpg"
        path.write_bytes(content)
        started = time.monotonic()
        ended = program(
            ("--mode=predict", f"--workdir={whole}", f"--images={path}", f"--images={program.photo}", "--output=-")
        )
        seconds = time.monotonic() - started
        reason = "" if seconds < 30 and ended.quiet else f"exit code {ended.code} after {seconds:.0f} s"
        yield "servers", f"predict a JPEG of {name}", not reason, reason


SCANS = ((7000, 2000), (7000, 490), (2000, 2000), (500, 20_000))


def _late(port: int, image: bytes) -> list[str]:
    started = time.monotonic()
    _post(port, image, 4 * ANSWER)
    seconds = time.monotonic() - started
    return [] if seconds <= ANSWER else [f"another client is answered after {seconds:.1f} s"]


# --------------------------------------------------------------------------------------------------------------- people
def make_photos(folder: Path, *, images: int = 40, wrong: int = 4) -> None:
    """Write images whose color tells their labels, and a table in which a few labels are wrong."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    lines = ["image,labels"]
    for n in range(images):
        red, bright = n % 2, n // 2 % 2
        pixels = random.integers(0, 60, (32, 32, 3)) + 60 + 80 * bright
        pixels[..., 0] += 60 * red
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{n}.png")
        red ^= n < wrong
        lines.append(f"{n}.png,{';'.join(['red'] * red + ['bright'] * bright)}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")


def _answer(path: Path, answer: str) -> int:
    """Write an answer into all suggestions, as a spreadsheet program does; return their number."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"accept": answer} for row in rows)
    return len(rows)


def _answers(folder: Path, answer: str) -> int:
    """Return the number of different suggestions with an answer, in all tables of a folder."""
    found = set()
    for path in folder.glob("suggestions*.csv"):
        with open(path, newline="", encoding="utf-8-sig") as file:
            found |= {(row["image"], row["label"]) for row in csv.DictReader(file) if row["accept"] == answer}
    return len(found)


def people(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Audit labels before and while a person answers suggestions."""
    photos, folder = program.place / "answered", program.place / "audit"
    make_photos(photos)
    command = ("--mode=data", "--audit", CONFIG.format(photos), f"--output={folder}")
    started = time.monotonic()
    first = program(command, fresh=True)
    seconds = time.monotonic() - started
    if first.code not in (0, 1):
        yield "people", "audit", False, first.text[-300:]
        return
    table = folder / "suggestions.csv"
    count = _answer(table, "no")
    program(command, fresh=True)
    reason = "" if _answers(folder, "no") == count else f"{_answers(folder, 'no')} of {count} answers are left"
    yield "people", "audit again after answers", not reason, reason
    for share in (0.5,) if quick else (0.1, 0.3, 0.5, 0.7, 0.9, 0.95):
        shutil.rmtree(folder)
        program(command, fresh=True)
        running = program.launch(command)
        time.sleep(share * seconds)
        count = _answer(table, "yes")
        code = running.wait(120)
        left = _answers(folder, "yes")
        reason = "" if code in (0, 1) and left == count else f"exit code {code}, {left} of {count} answers are left"
        yield "people", f"answers after {share:.0%} of an audit", not reason, reason


# ----------------------------------------------------------------------------------------------------------- stale data
def _photograph(path: Path, number: int, *, orientation: int = 0) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (40, 56, 3), np.uint8)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif)


def _content(folder: Path) -> dict[str, str]:
    """Return the digests of the images that a folder of packed data holds."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    names = [path for path in files if path.suffix not in (".json", ".lock")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def stale(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Use data again that was derived from images which have changed, or with other keys."""

    def change_image(photos: Path) -> None:
        _photograph(photos / "3.jpg", 99)

    def change_label(photos: Path) -> None:
        table = photos / "labels.csv"
        table.write_text(table.read_text().replace("4.jpg,sea", "4.jpg,sand"))

    changes: dict[str, tuple[Callable[[Path], object], str]] = {
        "an image changed": (change_image, ""),
        "data.exif": (lambda photos: None, "--config.data.exif=ignore"),
        "a label changed": (change_label, ""),
        "pack.short_side": (lambda photos: None, "--config.pack.short_side=24"),
        "data.truncated": (lambda photos: None, "--config.data.truncated=read"),
        "an image removed": (lambda photos: (photos / "2.jpg").unlink(), ""),
        "nothing changed": (lambda photos: None, ""),
        "an image touched": (lambda photos: os.utime(photos / "3.jpg"), ""),
    }
    for name, (change, key) in itertools.islice(changes.items(), 2 if quick else None):
        photos, output = program.place / "sources", program.place / "packed"
        photos.mkdir()
        for n in range(8):
            _photograph(photos / f"{n}.jpg", n, orientation=6 * (n == 6))
        whole_file = (photos / "7.jpg").read_bytes()
        (photos / "7.jpg").write_bytes(whole_file[: len(whole_file) * 2 // 3])
        rows = [f"{n}.jpg,{'sea' if n % 2 == 0 else 'sand'}" for n in range(8)]
        (photos / "labels.csv").write_text("\n".join(["image,labels", *rows, ""]))
        command = ("--mode=pack", CONFIG.format(photos))
        first = program((*command, f"--output={output}"), fresh=True)
        change(photos)
        again = program((*command, *filter(None, [key]), f"--output={output}"), fresh=True)
        program((*command, *filter(None, [key]), f"--output={output}-new"), fresh=True)
        reason = first.text[-300:] if first.code else _stale(again, output, Path(f"{output}-new"))
        if not reason and name in ("nothing changed", "an image touched") and again.code:
            reason = str(again)
        yield "stale", f"pack again, {name}", not reason, reason
        for folder in (photos, output, Path(f"{output}-new")):
            shutil.rmtree(folder, ignore_errors=True)
    yield _stale_features(program)


def _stale(again: Ended, output: Path, fresh: Path) -> str:
    if again.code == 2:
        return "" if again.one_sentence else again.text[-300:]
    if again.code:
        return str(again)
    return (
        "" if _content(output) == _content(fresh) else "exit code 0, but the packed data are not those of a new folder"
    )


def _stale_features(program: Program) -> Case:
    """Train on cached features after an image has changed: the results are those of an empty cache."""
    photos = program.place / "featured"
    make_photos(photos)
    results = {}
    for name in ("before", "after", "empty"):
        if name == "after":
            for n in range(0, 20):
                _photograph(photos / f"{n}.png", n)
        run = program.place / f"features-{name}"
        variables = {"MLMOE_CACHE": str(program.place / "empty")} if name == "empty" else {}
        ended = program.launch((CONFIG.format(photos), f"--workdir={run}"), variables=variables)
        if ended.wait(200):
            return "stale", "cached features", False, ended.text()[-300:]
        results[name] = (run / "results.json").read_text()
    reason = "" if results["after"] == results["empty"] else "the results are not those of an empty cache"
    if results["before"] == results["after"]:
        reason = "the results are those of the images before the change"
    return "stale", "cached features after images changed", not reason, reason


# ---------------------------------------------------------------------------------------------------- several processes
def together(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Fit thresholds and calibration of one run at the same time: the file is that of one after the other."""
    commands = {
        "thresholds": ("--mode=thresholds", "--config.thresholds.per=global"),
        "calibrate": ("--mode=calibrate",),
    }
    serial = {}
    for order in (*itertools.permutations(commands), ("thresholds",), ("calibrate",)):
        run = program.place / "serial"
        shutil.copytree(whole, run)
        for name in order:
            if (ended := program((*commands[name], f"--workdir={run}"))).code:
                raise RuntimeError(f"{name} failed: {ended.text}")
        serial[order] = json.loads((run / "thresholds.json").read_text())
        shutil.rmtree(run)
    go = program.place / "fitted"
    for seconds in (15,) if quick else (15, 1, 5, 30):
        run = program.place / "together"
        shutil.copytree(whole, run)
        running = {"calibrate": program.launch((*commands["calibrate"], f"--workdir={run}"), fault=f"fit wait 1 {go}")}
        time.sleep(10)  # it waits before its fit
        running["thresholds"] = program.launch((*commands["thresholds"], f"--workdir={run}"))
        running["thresholds"].wait(seconds)
        go.touch()
        codes = {name: process.wait(120) for name, process in running.items()}
        done = tuple(name for name, code in codes.items() if code == 0)
        refused = [name for name, process in running.items() if codes[name] and not process.ended.one_sentence]
        allowed = [serial[order] for order in serial if sorted(order) == sorted(done)]
        result = json.loads((run / "thresholds.json").read_text())
        reason = "; ".join(running[name].text()[-300:] for name in refused)
        if not reason and result not in allowed:
            reason = f"the file is not that of {' and '.join(done) or 'neither'}, one after the other"
        yield "together", f"thresholds while calibrate fits for {seconds} s", not reason, reason
        shutil.rmtree(run)
        go.unlink()


def temporary(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Kill a command while it writes: the next one, on other images, removes what was left."""
    commands: dict[str, Callable[[Path, Path], tuple[str, ...]]] = {
        "features": lambda photos, out: (CONFIG.format(photos), f"--workdir={out}"),
        "pack": lambda photos, out: ("--mode=pack", CONFIG.format(photos), f"--output={out}"),
        "predict": lambda photos, out: (
            "--mode=predict",
            f"--workdir={whole}",
            f"--images={photos}",
            f"--output={out}.csv",
        ),
    }
    first, second = program.place / "first", program.place / "second"
    make_photos(first)
    make_photos(second, images=36)
    for name, command in itertools.islice(commands.items(), 1 if quick else None):
        for count in (1,) if quick else (1, 2):
            out = program.place / "out"
            out.mkdir()
            killed = program(command(first, out / "a"), f"saving {signal.SIGKILL.value} {count}", fresh=True)
            left = _temporary(program, out)
            ended = program(command(second, out / "b") if name == "features" else command(first, out / "a"), fresh=True)
            rest = _temporary(program, out)
            reason = f"{len(rest)} temporary files are left, such as {rest[0]}" if rest else ""
            if ended.code:
                reason = str(ended)
            observation = reason or f"exit code {killed.code}, {len(left)} temporary files then, none now"
            yield "temporary", f"{name}: SIGKILL at file {count}", not reason, observation
            shutil.rmtree(out)
            shutil.rmtree(program.place / "cache", ignore_errors=True)
    go, out = program.place / "go", program.place / "out"
    out.mkdir()
    living = program.launch(commands["features"](first, out / "a"), fault=f"saving wait 1 {go}")
    time.sleep(1)
    while living.wait(0.1) is None and not _temporary(program, out):
        pass
    program(commands["features"](second, out / "b"), fresh=True)
    go.touch()
    code = living.wait(200)
    reason = "" if code == 0 else f"exit code {code}: {living.text()[-300:]}"
    yield "temporary", "a file of a living process stays", not reason, reason


def _temporary(program: Program, out: Path) -> list[str]:
    places = (program.place / "cache", out, program.place / "first", program.place / "second")
    return sorted(
        str(path) for place in places for path in place.rglob("*") if path.suffix == ".tmp" or ".tmp" in path.name
    )


# ------------------------------------------------------------------------------------------------------------ workers
SCRIPT = """
import mlmoe_jax as mm
config = mm.load_config("own_csv:root={photos},backbone=efficientnet_lite0,resolution=32")
config.data.workers = 2
for batch in mm.load_batches(config, mm.open_split(config), batch_size=8, training=True):
    break
print("read")
"""
DYING = "import os\nif __name__ == '__mp_main__': os._exit(3)\n"  # the name of a script in a worker process


def workers(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Read images with worker processes in scripts that were not written for them; stop a training that waits."""
    photos, path = program.place / "worked", program.place / "script.py"
    make_photos(photos)
    text = SCRIPT.format(photos=photos)
    guarded = "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in text.splitlines())
    cases: dict[str, tuple[str, tuple[str, ...]]] = {
        "a script that ends with sys.exit": (f"{guarded}\nimport sys\nsys.exit(0)", (str(path),)),
        "a script without a guard": (text, (str(path),)),
        "a script on stdin": (text, ("-",)),
        "workers that die at their start": (DYING + guarded, (str(path),)),
        "exec of a file": (text, ("-c", f"exec(open({str(path)!r}).read())")),
        "python -c": (text, ("-c", text)),
        "a script with a guard": (guarded, (str(path),)),
    }
    for name, (content, arguments) in itertools.islice(cases.items(), 1 if quick else None):
        path.write_text(content)
        running = program.launch(arguments, program=(sys.executable,), stdin=path)
        code, end = running.wait(60), running.text().splitlines()
        running.kill()
        reason = "it hangs" if code is None else ""
        if code is not None and (code == 0) != ("read" in end):
            reason = f"exit code {code}: {running.text()[-300:]}"
        yield "workers", name, not reason, reason or ("images read" if code == 0 else end[-1][:150])
    yield _hanging_workers(program, photos)


def _hanging_workers(program: Program, photos: Path) -> Case:
    """Send SIGTERM to a training whose workers hang."""
    keys = ("data.workers=2", "data.cache_features=no", "train.batch_size=8", "eval.every_epochs=1000")
    config = f"{CONFIG.format(photos)},fit=steps,epochs=1000"
    training = program.launch((config, f"--workdir={program.place}/waiting", *(f"--config.{key}" for key in keys)))
    started = time.monotonic()
    while "train 1" not in training.text() and training.wait(0.5) is None and time.monotonic() < started + 120:
        pass
    for child in training.children():
        os.kill(child, signal.SIGSTOP)
    time.sleep(10)  # until no batch is left
    training.signal(signal.SIGTERM)
    code = training.wait(20)
    training.kill()
    reason = "" if code == 130 else f"exit code {code} after SIGTERM: {training.text()[-300:]}"
    return "workers", "SIGTERM while workers hang", not reason, reason
