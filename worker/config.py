"""The worker's options, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from shared.capacity import Role
from shared.config import MeshConfig, at_least, between, is_size, option
from shared.pool_name import is_pool_name
from worker.lora_names import are_adapters
from worker.transfer.transports import are_transports


@dataclass(frozen=True)
class WorkerConfig(MeshConfig):
    """A Headrace worker: runs batched forward passes of one model."""

    model: str = option(
        "default", "Hugging Face id, local folder or GGUF file; 'default' is the bundled SmolLM2-135M-Instruct"
    )
    served_model_name: str = option("", "name that clients use for the model (default: made from --model)")
    worker_id: str = option("", "name of this worker on the bus (default: a random one)")
    dtype: str = option(
        "auto",
        "weights and KV cache; auto: bfloat16 on a GPU and on a CPU that multiplies it (AVX512-BF16), else float32",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
    )
    device: str = option("auto", "auto takes a GPU where there is one", choices=("auto", "cpu", "cuda"))
    quantize: str = option(
        "none",
        "weights in fewer bits, rounded: on a CPU int8, which halves what a step reads; on a GPU, through torchao, "
        "int8, int4 (of groups) and fp8 (e4m3; activations too)",
        choices=("none", "int8", "int4", "fp8"),
    )
    pool: str = option(
        "", "pool of workers that this one is in, apart from the model's others (see --pools of the scheduler); empty: "
        "the pool default",
        check=is_pool_name,
    )  # fmt: skip
    lora: str = option(
        "", "LoRA adapters that requests may run with: NAME=FOLDER in PEFT's layout, several separated by commas",
        check=are_adapters,
    )  # fmt: skip
    tensor_parallel: int = option(
        1, "GPUs of this machine that a model is divided over; KV blocks are of the one that has the fewest",
        check=between(1, 64),
    )  # fmt: skip
    attention_backend: str = option(
        "auto",
        "attention kernel; auto: on a GPU triton, and beside it (flash) what an installed flash-attn does quicker, as "
        "measured at start; on a CPU the C++ kernels (cpu), else torch",
        choices=("auto", "triton", "flash", "torch", "cpu"),
    )
    batch_invariant: bool = option(
        False, "a request's tokens do not depend on its batch: on a GPU by slower kernels, on a CPU in any case"
    )
    cuda_graphs: str = option(
        "auto",
        "on a GPU, run steps that only decode as captured graphs, which take less of the host; auto: where the model's "
        "code can be captured",
        choices=("auto", "off"),
    )
    cuda_graph_rows: int = option(
        256, "sequences of the largest step that runs as a graph; more take more memory", check=between(1, 1024)
    )
    warm_up_s: float = option(
        60.0,
        "on a GPU, seconds at start for compiling kernels and capturing graphs, which steps would wait for; 0: none",
        check=between(0, 3600),
    )
    kv_cache_dtype: str = option(
        "auto",
        "what KV blocks hold; auto: the dtype; fp8 (e4m3) and int8 take less and round, each token's head with a scale",
        choices=("auto", "fp8", "int8"),
    )
    block_size: int = option(16, "tokens per KV block", check=between(1, 1024))
    max_model_len: int | None = option(
        None, "longest prompt + output, in tokens (default: the model's own limit); clamped to the KV pool",
        check=at_least(1),
    )  # fmt: skip
    kv_cache_memory: str = option("1GiB", "memory for KV blocks on a CPU, e.g. 512MiB or 4GiB", check=is_size)
    swap_space: str = option(
        "0", "host memory for KV blocks of preempted sequences, e.g. 4GiB; 0: they are recomputed", check=is_size
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory for weights, activations and KV blocks", check=between(0.05, 1.0)
    )
    max_batched_tokens: int = option(
        8192, "tokens of one step on a GPU, at most: memory for so many is set aside, and the scheduler plans no more",
        check=at_least(16),
    )  # fmt: skip
    role: str = option(
        "mixed",
        "what the worker is for: prefill computes prompts and hands their KV blocks over, decode goes on with them, "
        "mixed does both; without one of the other kind each does all",
        choices=tuple(Role),
    )
    threads: int = option(0, "compute threads on a CPU; 0: as torch chooses", check=between(0, 1024))
    transfer_host: str = option(
        "",
        "address at which other workers fetch this one's KV blocks, for migration and for prefill apart from decode; "
        "auto: its own on the way to NATS; off: nowhere; empty: auto for a worker with a role, else off. Blocks travel "
        "unencrypted, to who knows a key that beats tell",
    )
    transfer_port: int = option(
        0, "port at which other workers fetch KV blocks; 0: any free one", check=between(0, 65535)
    )  # fmt: skip
    transfer_by: str = option(
        "auto",
        "how KV blocks may travel, first choice first: shm (between processes of a machine), nixl (where it is "
        "installed), tcp; auto: all of them, but nixl only where there is a network for RDMA",
        check=are_transports,
    )
    metrics_host: str = option("127.0.0.1", "address of the metrics listener")
    metrics_port: int = option(9402, "port of the metrics listener; 0: any free one", check=between(0, 65535))
    drain_grace_s: float = option(30.0, "how long a stopping worker lets its sequences finish", check=at_least(0))
    simulate: bool = option(False, "simulate the model: same process and messages, a step-time model for the device")
    simulate_base_us: float = option(2000.0, "simulated step time: base", check=at_least(0))
    simulate_token_us: float = option(50.0, "simulated step time: per token in the batch", check=at_least(0))
    simulate_blocks: int = option(4096, "KV blocks of a simulated worker", check=at_least(1))
    simulate_vocab_size: int = option(32000, "vocabulary of a simulated model", check=at_least(2))
    simulate_eos: int = option(-1, "end-of-sequence id of a simulated model; -1: none", check=at_least(-1))
