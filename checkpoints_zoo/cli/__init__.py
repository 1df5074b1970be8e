"""`zoo-cli`: each command parses, calls the library, prints."""
