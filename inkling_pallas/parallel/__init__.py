"""Several devices: meshes, contexts cut over them, and what merges partial results."""
