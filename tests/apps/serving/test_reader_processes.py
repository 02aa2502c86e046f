"""Processes that decode images. They import this module, which therefore imports little."""

import asyncio
import os
import sys
import time

import pytest

from mlmoe_jax.apps.serving.readers import Readers, Turns
from mlmoe_jax.data.images import MAX_DECODED, BadImage


def act(content: bytes, name: str):
    if content == b"sleep":
        time.sleep(60)
    if content == b"crash":
        os._exit(1)
    if content == b"memory":
        try:
            return len(bytes(4 * MAX_DECODED))
        except MemoryError:
            raise BadImage(f"no memory for {name}") from None
    return os.getpid()


@pytest.fixture
def readers():
    """One process."""
    started = Readers(1)
    yield started
    started.close()


def result(readers: Readers, content: bytes = b"") -> int | str:
    """The process that has read a file, or an error."""
    try:
        return readers(act, content, "a.jpg")
    except (BadImage, OSError) as error:
        return str(error)


def test_a_reader_that_takes_too_long_or_ends_is_replaced(readers, monkeypatch):
    first = result(readers)
    assert result(readers) == first != os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(readers, "_seconds", 0.2)
        assert "cannot read a.jpg as an image: decoding it takes more than 0.2 s;" in result(readers, b"sleep")
    assert "cannot read a.jpg as an image: its decoder failed;" in result(readers, b"crash")
    assert readers.replaced == 2
    if sys.platform == "linux":
        assert result(readers, b"memory") == "no memory for a.jpg"
    assert result(readers) not in (first, os.getpid())


def test_a_reader_is_replaced_later_if_no_process_can_be_started(readers, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mlmoe_jax.apps.serving.readers._Process", lambda: os.open("/missing", os.O_RDONLY))
        assert "No such file" in result(readers, b"crash")
    assert "its decoder failed" in result(readers)
    assert result(readers) != os.getpid()


def test_a_request_of_slow_images_waits_for_others_that_arrive_later():
    async def main():
        turns, order = Turns(1), []

        async def take(due, name):
            async with turns(due):
                order.append(name)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(take(due, name)) for due, name in ((0, "a"), (40, "slow"), (9, "gone"), (5, "b"))]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.wait(tasks)
        await take(0, "free again")
        return order

    assert asyncio.run(main()) == ["a", "b", "slow", "free again"]
