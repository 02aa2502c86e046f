"""The order in which images are decoded."""

import asyncio

from mlmoe_jax.apps.serving.turns import Turns


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
