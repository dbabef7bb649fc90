"""What two services must agree on bit for bit: messages, subjects, ids, the bus, configuration, process life."""
