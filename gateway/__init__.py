"""HTTP, the OpenAI-compatible API, SSE, tokenising and detokenising. Knows no blocks, batches or tensors."""
