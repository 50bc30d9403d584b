"""The published version and the update in progress, as Redis has them."""

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.gateway import scripts
from services.gateway.journal import Fenced
from services.gateway.keys import GatewayKeys
from services.gateway.update import Published, Update, UpdateBook


class VersionStore:
    """Reads and writes an UpdateBook as the holder of the lease."""

    def __init__(self, redis: Redis, namespace: str, token: str) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._token = token

    async def load(self, abandoned_after: float) -> UpdateBook:
        """The book as it was last saved."""
        published, update = await self._redis.mget(self._keys.published, self._keys.update)
        book = UpdateBook(abandoned_after, Published.from_json(published) if published else None)
        book.active = Update.from_json(update) if update else None
        return book

    async def save(self, book: UpdateBook) -> None:
        """Records the book. The version that the fleet started with is not recorded: it has no path, and
        the instances themselves say what it is. Raises Fenced when another gateway has taken over."""
        recorded = book.published is not None and bool(book.published.path)
        published = book.published.to_json() if book.published and recorded else ""
        update = book.active.to_json() if book.active else ""
        keys = (self._keys.lease, self._keys.published, self._keys.update)
        try:
            await self._redis.eval(scripts.RECORD, len(keys), *keys, self._token, published, update)
        except ResponseError as error:
            if str(error).startswith("FENCED"):
                raise Fenced(str(error)) from error
            raise
