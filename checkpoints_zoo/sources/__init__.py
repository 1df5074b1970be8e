"""Sources of members: folders, repositories on the Hub, folders on the web, archives, pickled draws. This package reads
byte ranges, caches members and copies them, without importing torch."""
