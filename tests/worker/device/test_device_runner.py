"""The device runner behind the production step loop and scheduler core: right tokens whatever runs late."""

from __future__ import annotations

import random

import msgspec
from device_box import DeviceBox
from hash_model import VOCAB
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mesh_in_a_box import request

from shared.messages import Submit


def ask(name: str, prompt: int = 7, tokens: int = 9, n: int = 1, beams: int = 0, **how: object) -> Submit:
    seed = sum(name.encode())
    words = [(seed * 7 + 3 * place) % VOCAB for place in range(prompt)]
    submit = request(name, 0, tokens, seed=seed, n=n, beams=beams, ignore_eos=False, prompt=words)
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(submit.sampling, **how))


def test_steps_overlap_and_tokens_are_those_of_the_plain_model() -> None:
    box = DeviceBox()
    for index in range(6):
        box.submit(ask(f"r{index}", 3 + 4 * index, 20))
    box.run()
    box.assert_tokens_right()
    assert box.overlaps and len(box.ends) == 6
    assert {len(got) for got in box.delivered.values()} != {20}, "nothing ended early: no row was ever run in vain"


HOW = {
    "temperature": (0.0, 0.7), "top_p": (0.8,), "top_k": (5,), "min_tokens": (6,), "want_score": (True,),
    "logprobs": (0, 3), "presence_penalty": (0.9,), "repetition_penalty": (1.3,), "logit_bias": ([(5, 1.5)],),
    "prompt_logprobs": (1,),
}  # fmt: skip
EXAMPLES = settings().max_examples


def some_request(rng: random.Random, name: str) -> Submit:
    beams = rng.choice((0, 0, 0, 0, 2))
    chosen = rng.sample(sorted(HOW), rng.choice((0, 1, 2)))
    how = {} if beams else {key: rng.choice(HOW[key]) for key in chosen}
    return ask(name, rng.randint(1, 30), rng.randint(1, 20), beams or rng.choice((1, 1, 1, 2, 3)), beams, **how)


@settings(max_examples=EXAMPLES // 5, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 1 << 30))
def test_random_schedules(seed: int) -> None:
    """Joins, leaves, chunks, forks, copies, swaps, preemptions, ends that a step in flight does not know of."""
    rng = random.Random(seed)
    box = DeviceBox(
        seed, num_blocks=rng.choice((12, 20, 64)), host_blocks=rng.choice((0, 16)), graph_rows=rng.choice((0, 3, 8))
    )
    for index in range(rng.randint(1, 8)):
        box.submit(some_request(rng, f"r{index}"))
        for _ in range(rng.randint(0, 4)):
            box.step()
        if rng.random() < 0.2:
            box.cancel(f"r{rng.randint(0, index)}")
    box.run()
    box.assert_tokens_right()
