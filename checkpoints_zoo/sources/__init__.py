"""Sources of members: folders, repositories on the Hub, archives. Reads by ranges, caches and copies; no torch."""
