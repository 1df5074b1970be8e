"""What lies on disk: layouts, safetensors shards, manifests, selections and the catalog, without torch or pandas."""
