"""Hold one conversation at a time: what arrives while the model answers joins its turn, and the user may stop it.

::

    usher run examples.conversation:converse
    usher send --ticket chat-1 --wait text="Where is my order?"
    usher send --ticket chat-1 text="It is number 7."            # while it answers: both are answered together
    usher tickets interrupt chat-1                               # the user presses Stop
    usher tickets follow chat-1
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from usher import Message

WORD_S = 0.05


async def model(asked: str) -> AsyncIterator[str]:
    """Stream the words of a pretend model."""
    for word in f"You said: {asked}".split():
        await asyncio.sleep(WORD_S)
        yield word


async def converse(message: Message) -> dict[str, str | bool]:
    """Answer what was said in this conversation since the last turn."""
    asked = [message, *message.absorb()]
    said: list[str] = []
    try:
        while True:
            async for word in model(" ".join(one.fields["text"] for one in asked)):
                said.append(word)
                message.progress(word)  # to whoever waits: Producer.stream, a browser
                if more := message.absorb():  # somebody added something: begin anew, with all of it
                    asked += more
                    said.clear()
                    break
            else:
                return {"answer": " ".join(said), "stopped": False}
    except asyncio.CancelledError:
        if not message.cancelled.is_set():  # this process ends, and another one answers
            raise
        return {"answer": " ".join(said), "stopped": True}
