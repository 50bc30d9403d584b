"""Instances that the reallocator knows, on a real Redis that loses records."""

from __future__ import annotations

from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.reallocator.members import PolledInstances
from tests.integration.gateway.conftest import until
from tests.integration.reallocator.conftest import Figure5, Known

RECORD = InstanceRecord("generation", "g0", address="127.0.0.1:1", state="serving", vocab_size=100)


async def test_an_instance_stays_known_where_redis_lost_its_record(redis_url: str, namespace: str) -> None:
    config, keys = ServiceConfig(redis_url=redis_url), Keys(namespace)
    store = connect(config)
    members = PolledInstances(config, Registry(store, keys), lambda record: Known(Figure5().seconds, 64))

    async def known() -> bool:
        await members.refresh()
        return "g0" in members.known

    async def gone() -> bool:
        return not await known()

    try:
        await Registration(store, keys, RECORD, ttl=60.0).register()
        assert await known()
        roofline = members.known["g0"].roofline
        # Redis has forgotten all that it knew, the reader's own key included.
        await store.delete(*[key async for key in store.scan_iter(f"{keys.registry_index('generation')}*")])
        await store.delete(keys.registry("generation", "g0"))
        assert await known()
        assert members.known["g0"].roofline is roofline
        # It is not told from a dead instance for ever.
        await until(gone, "an instance that does not register again is forgotten")
    finally:
        await members.close()
        await store.aclose()
