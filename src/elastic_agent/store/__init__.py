"""Clients of stores, for asyncio."""

from __future__ import annotations

from .tcpstore import TCPStoreClient, wait_for_keys

__all__ = ["TCPStoreClient", "wait_for_keys"]
