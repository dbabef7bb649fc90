"""What workers and models can take, as beats tell it."""

from __future__ import annotations

from enum import StrEnum

from shared.message import Message


class Role(StrEnum):
    """What a worker is for. Each kind can do the other's work: a request without a place elsewhere is not stuck."""

    MIXED = "mixed"
    PREFILL = "prefill"  # computes prompts, then hands their KV blocks to a worker that decodes
    DECODE = "decode"


class Capacity(Message, frozen=True):
    """What a worker can take, and what it was started for. Constant as long as its process lives."""

    model: str
    max_model_len: int
    block_size: int  # tokens per KV block
    num_blocks: int  # usable KV blocks, numbered 1 .. num_blocks; page 0 is the worker's scratch page
    vocab_size: int  # rows of the embedding
    eos_token_ids: list[int]
    device: str = "cpu"
    dtype: str = ""
    kv_bytes_per_token: int = 0
    host_blocks: int = 0  # KV blocks that fit in host memory set aside for swapping
    grammars: bool = True  # whether Sampling.grammar can be asked for
    kv_dtype: str = ""  # what KV blocks hold, where that is not the dtype
    max_batched_tokens: int = 0  # tokens of one step, at most; 0: no limit
    pool: str = ""  # the pool of workers that it is in; empty: the model's only one
    role: Role = Role.MIXED  # to begin with: a planner may give it another
    transfer: list[str] = []  # where others may fetch its KV blocks from, the quickest way first; empty: nowhere
    adapters: list[str] = []  # LoRA adapters that it can run, by name
    weights: str = ""  # a digest that tells them from others under the model's name; empty: not told
    adapter_weights: list[str] = []  # the same of each adapter, in their order


class PoolInfo(Message, frozen=True):
    """One pool of a model's workers, with its queue. Figures as in :class:`ModelInfo`."""

    name: str
    workers: int
    waiting: int = 0
    waiting_tokens: int = 0
    max_waiting: int = 0
    max_waiting_tokens: int = 0
    service_rate: float = 0.0
    max_model_len: int = 0  # of the ready worker that takes most; 0: there is none, or it is not told
    adapters: list[tuple[str, int]] = []  # that its ready workers can run, by name, each with its max_model_len
    shortest_prompt: int = 0  # of the range of prompts that it is for, in tokens
    longest_prompt: int = -1  # the same; -1: it has no range
    overflow: list[str] = []  # pools that get what none of its workers can ever hold, in order


class ModelInfo(Message, frozen=True):
    name: str
    max_model_len: int  # clamped to the KV pool
    vocab_size: int
    workers: int  # ready ones
    waiting: int = 0  # sequences in the queue
    waiting_tokens: int = 0  # prompt tokens and max_tokens that wait
    max_waiting: int = 0  # beyond which the queue is full; 0: not told
    max_waiting_tokens: int = 0  # the same in tokens; 0: no bound
    service_rate: float = 0.0  # sequences that left the queue per second, of late; 0: none yet
    queue_size: int = 0  # sequences that the queue holds when it is empty: no request may have more; 0: not told
    grammars: bool = True  # whether every worker takes them
    adapters: list[str] = []  # LoRA adapters of which some ready worker can run each, by name
    pools: list[PoolInfo] = []  # that have ever had a worker, by name; the figures above are of all together
