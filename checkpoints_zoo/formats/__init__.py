"""File formats: layouts, safetensors shards, manifests, selections and the catalog; no torch, no pandas."""
