"""Scripts that measure; each says at its top how it is run. A package only so that its parts can be tested."""
