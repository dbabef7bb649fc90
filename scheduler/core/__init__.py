"""The pure scheduling core: no I/O, clock, randomness, torch or nats. Time comes in as integer nanoseconds."""
