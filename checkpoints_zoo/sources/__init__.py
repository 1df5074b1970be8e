"""Sources of members: folders, repositories on the Hub, archives. This package reads byte ranges, caches members and
copies them, without importing torch."""
