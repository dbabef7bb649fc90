"""The scheduler service: a pure core that decides every iteration, and a thin NATS shell around it."""
