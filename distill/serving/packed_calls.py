"""Calls whose replies are packed, and come through shared memory where client and server are on one machine."""

from __future__ import annotations

import asyncio
from typing import Any

from distill.serving.calls import Calls, Reply
from distill.serving.reply_files import HEADER, LEAST_BYTES, LostReplyError, ReplyFile, ReplyFolder


class PackedCalls(Calls):
    """`half`: the log-probabilities of top-k rows travel as float16, where the server has packed replies."""

    def __init__(self, url: str, *, name: str = "", timeout_s: float = 600.0, half: bool = False) -> None:
        super().__init__(url, name=name, timeout_s=timeout_s)
        self.half = half
        self._files = ReplyFolder()

    async def packed_reply(self, body: dict[str, Any] | bytes, awaited: str) -> tuple[int, str, bytes | memoryview]:
        """(status, content type, body) of /generate. A file that is not what the server says costs one more call,
        through HTTP."""
        file = self._files.file()
        if file is not None:
            try:
                return await self._through(file, body, awaited)
            except LostReplyError:
                pass
            finally:
                file.close()
        return await self.call("POST", "/generate", body, awaited=awaited)

    async def close(self) -> None:
        self._files.close()
        await super().close()

    async def _through(
        self, file: ReplyFile, body: dict[str, Any] | bytes, awaited: str
    ) -> tuple[int, str, bytes | memoryview]:
        reply: Reply = await self.exchange("POST", "/generate", body, None, awaited, {HEADER: file.header})
        told = reply.headers.get(HEADER)
        if reply.status == 200 and told is not None:
            return reply.status, reply.kind, await asyncio.to_thread(file.take, told)
        if reply.status == 200 and len(reply.body) >= LEAST_BYTES:
            self._files.give_up()
        return reply.status, reply.kind, reply.body
