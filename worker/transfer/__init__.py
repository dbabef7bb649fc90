"""KV blocks from worker to worker, beside the step loop.

The worker that wants blocks asks the one that has them, over a connection of their own: nothing of it crosses the bus
but the plan that orders it and the word that it is over. Who fetches writes into its own pages; a source only reads.
"""
