"""Which CTA does what: tiles, the line of KV tiles, and the list of query tiles."""
