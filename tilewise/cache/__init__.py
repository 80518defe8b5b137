"""Keys and values that decoding reads again and again: in one array, or in pages that sequences take and give back."""

from tilewise.cache.base import Cache
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache

__all__ = ["Cache", "KVCache", "PagedKVCache"]
