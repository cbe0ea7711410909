"""Times the operator beside the ceilings of a card and its peers."""
