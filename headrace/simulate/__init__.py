"""``headrace simulate``: the production scheduler core in virtual time, on modelled hardware and workloads."""
