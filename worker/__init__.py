"""Model loading, paged KV tensors, the batched forward pass, sampling. Knows no queues, policies or tenants."""
