"""A web application (FastAPI) that waits for what a handler makes, or passes it on while it is made. Of a conversation
one question at a time is answered, in order, whichever process of the application asks::

    usher up --handler examples.request_reply:answer --redis-url redis://...
    REDIS_URL=redis://... uvicorn examples.request_reply:app
    curl -N 'localhost:8000/conversations/42/stream?ask=Who+are+you'
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from usher import AsyncProducer, CallTimeout, Failed


async def answer(message: Any) -> dict[str, Any]:
    """Pretend to be a model: the handler, in a consumer."""
    words = f"You asked: {message.fields['ask']}?".split()
    for word in words:
        await asyncio.sleep(0.05)
        message.progress(word)
    return {"answer": " ".join(words), "attempt": message.attempt}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncProducer(os.environ["REDIS_URL"]) as app.state.producer:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/conversations/{conversation}/answer")
async def wait(request: Request, conversation: str, ask: str) -> Any:
    try:
        return await request.app.state.producer.call(conversation, {"ask": ask}, timeout_s=30)
    except Failed as failed:
        raise HTTPException(502, failed.reason) from None
    except CallTimeout as late:
        raise HTTPException(504, f"it is still being answered, as {late.id}") from None


@app.get("/conversations/{conversation}/stream")
async def stream(request: Request, conversation: str, ask: str) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        answers = request.app.state.producer.stream(conversation, {"ask": ask}, timeout_s=30)
        async for word in answers:
            yield f"data: {json.dumps(word)}\n\n"
        yield f"event: result\ndata: {json.dumps(answers.result)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
