"""Zarr stores under a guard, which is called before every file that is written and raises where none may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import WrapperStore


class Guarded(WrapperStore[Any]):
    def __init__(self, store: Store, guard: Callable[[], None]) -> None:
        super().__init__(store)
        self._guard = guard

    def _with_store(self, store: Store) -> Guarded:
        return Guarded(store, self._guard)

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self._guard)
        await self._store.set(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self._guard)
        await self._store.set_if_not_exists(key, value)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._guard)
        await self._store.delete(key)
