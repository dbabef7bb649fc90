"""Scripts that a peer's own Python runs: they import nothing of Headrace, and of one another only ``driving``."""
