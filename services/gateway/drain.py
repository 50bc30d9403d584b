"""Delete the batches of a journal, so that a gateway of another format can begin with an empty one.

python -m services.gateway.drain --redis-url redis://... --namespace paceline

Samples that their trainer has not received are lost: let the gateway that wrote the batches finish them first. The
published version, hints, and the data of other services stay.
"""

import asyncio
import sys
from typing import Any

from services.contracts.gateway_keys import GatewayKeys
from services.gateway.config import GatewayConfig
from services.platform.config import load_config
from services.platform.redis.connection import connect

_CHUNK = 500


async def drain(config: GatewayConfig) -> int:
    """Delete the keys of all batches; return their number. RuntimeError while a gateway leads."""
    redis: Any = connect(config)
    keys = GatewayKeys(config.namespace)
    try:
        holder = await redis.get(keys.lease)
        if holder is not None:
            raise RuntimeError(f"gateway {holder.decode()} leads: stop the gateways first")
        deleted = 0
        # The hash tag of a batch has a colon, run:batch. Keys of the registry are excluded by their name.
        async for name in redis.scan_iter(match=f"{config.namespace}:{{*:*}}:*", count=_CHUNK):
            if not name.startswith(f"{config.namespace}:{{registry:".encode()):
                deleted += await redis.unlink(name)
        await redis.delete(keys.batches, keys.format)
        return deleted
    finally:
        await redis.aclose()


def main() -> None:
    """Run the command."""
    try:
        deleted = asyncio.run(drain(load_config(GatewayConfig)))
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"deleted {deleted} keys")


if __name__ == "__main__":
    main()
