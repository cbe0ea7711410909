"""A small server around the operator: pages, scheduler, steps, and its commands."""
