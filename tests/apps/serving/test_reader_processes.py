"""Processes that decode images. They import this module, which therefore imports little."""

import asyncio
import os
import sys
import time

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
            raise BadImage(name) from None
    return os.getpid()


def test_a_reader_that_takes_too_long_or_ends_is_replaced(refusal):
    readers = Readers(1, seconds=5.0)
    first = readers(act, b"", "a")
    assert readers(act, b"", "a") == first != os.getpid()
    for content, reason in {b"sleep": "takes more than 5 s", b"crash": "its decoder failed"}.items():
        assert reason in refusal(readers, act, content, "a.jpg", error=BadImage)
    assert readers.replaced == 2
    if sys.platform == "linux":
        assert refusal(readers, act, b"memory", "a.jpg", error=BadImage) == "a.jpg"
    assert readers(act, b"", "a") not in (first, os.getpid())
    readers.close()


def test_a_reader_is_replaced_later_if_no_process_can_be_started(refusal, monkeypatch):
    readers = Readers(1)
    with monkeypatch.context() as patch:
        patch.setattr("mlmoe_jax.apps.serving.readers._Process", lambda: os.open("/missing", os.O_RDONLY))
        refusal(readers, act, b"crash", "a.jpg", error=OSError)
    refusal(readers, act, b"", "a.jpg", error=BadImage)
    assert readers(act, b"", "a.jpg") != os.getpid()
    readers.close()


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
