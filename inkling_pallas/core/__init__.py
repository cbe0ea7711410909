"""What every backend needs: problems, caches, lengths made safe, and the choice of a backend."""
