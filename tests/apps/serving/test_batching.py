"""The queue of images, with a model that returns its input."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from mlmoe_jax.apps.serving.batching import Batcher
from mlmoe_jax.apps.serving.labeler import first_batch_sizes

SIZES = {"plain": (4,), "other": (2,)}


def largest(waiting, kind):
    return min(waiting, *SIZES[kind])


def run(use, label=lambda images, kind: images, wait=0.02, more_expected=lambda: True, next_size=largest):
    """Return (the result of `await use(batcher)`, the sizes of all batches)."""
    sizes = []
    labeler = SimpleNamespace(label=label, sizes=SIZES, next_batch_size=next_size)

    async def main():
        batcher = Batcher(labeler, sizes.append, wait=wait, more_expected=more_expected)
        running = asyncio.create_task(batcher.run())
        result = await asyncio.wait_for(use(batcher), 20)
        batcher.close()
        await asyncio.wait_for(running, 20)
        return result

    return asyncio.run(main()), sizes


def test_an_image_alone_waits_only_so_long():
    async def use(batcher):
        started = asyncio.get_running_loop().time()
        await batcher.submit(["a"], "plain")
        return asyncio.get_running_loop().time() - started

    seconds, sizes = run(use, wait=0.2)
    assert 0.19 < seconds < 5
    assert sizes == [1]


def test_nobody_waits_if_nothing_is_coming():
    async def use(batcher):
        return await asyncio.gather(batcher.submit(["a"], "plain"), batcher.submit(["b"], "plain"))

    assert run(use, wait=1000, more_expected=lambda: False)[0] == [["a"], ["b"]]


def test_kinds_are_not_mixed():
    kinds = []

    def label(images, kind):
        kinds.append((kind, len(images)))
        return [f"{kind} {image}" for image in images]

    async def use(batcher):
        order = ["plain", "other"] * 3
        answers = await asyncio.gather(*(batcher.submit([n], kind) for n, kind in enumerate(order)))
        assert answers == [[f"{kind} {n}"] for n, kind in enumerate(order)]

    run(use, label)
    assert kinds == [("plain", 3), ("other", 2), ("other", 1)]


def test_an_error_reaches_the_requests_of_its_batch_only():
    def label(images, kind):
        if "bad" in images:
            raise ValueError("no")
        return images

    async def use(batcher):
        [error] = await asyncio.gather(batcher.submit(["good", "bad"], "plain"), return_exceptions=True)
        return str(error), await batcher.submit(["next"], "plain")

    assert run(use, label)[0] == ("no", ["next"])


def test_what_nobody_waits_for_is_not_labeled():
    seen, go = [], threading.Event()

    def label(images, kind):
        go.wait(20)
        seen.extend(images)
        return images

    async def use(batcher):
        first = asyncio.create_task(batcher.submit(["first"], "plain"))
        await asyncio.sleep(0.05)  # it is being labeled
        given_up = asyncio.create_task(batcher.submit(["given up"], "plain"))
        last = asyncio.create_task(batcher.submit(["last"], "plain"))
        await asyncio.sleep(0)
        assert len(batcher) == 2
        given_up.cancel()
        go.set()
        assert await first == ["first"]
        assert await last == ["last"]

    run(use, label)
    assert seen == ["first", "last"]


def test_requests_share_batches_and_closing_finishes_what_waits():
    async def use(batcher):
        waiting = [asyncio.create_task(batcher.submit([n], "plain")) for n in range(9)]
        await asyncio.sleep(0)
        batcher.close()
        return await asyncio.gather(*waiting)

    answers, sizes = run(use, wait=1)
    assert answers == [[n] for n in range(9)]
    assert sizes == [4, 4, 1]


def test_a_batch_has_the_share_of_what_waits_that_it_should_have():
    async def use(batcher):
        return await batcher.submit([*"abcde"], "plain")

    answers, sizes = run(use, next_size=lambda waiting, kind: {5: 3, 2: 1, 1: 1}[waiting])
    assert answers == [*"abcde"]
    assert sizes == [3, 1, 1]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1, 4: 3, 16: 12, 32: 24}, {1: 1, 3: 3, 5: 4, 8: 4, 16: 16, 20: 16, 32: 32}),  # a CPU
        ({1: 1, 4: 4.4, 16: 20, 32: 60}, {1: 1, 4: 1, 32: 1}),  # a CPU on which large batches leave the cache
        ({1: 1, 4: 1.1, 16: 1.3, 32: 1.6}, {1: 1, 2: 2, 5: 5, 17: 17, 32: 32}),  # a GPU
    ],
)
def test_images_are_split_into_the_batches_that_take_the_shortest_time(seconds, expected):
    found = first_batch_sizes(seconds)
    assert {images: found[images] for images in expected} == expected
