"""``headrace doctor --gpu``: do the GPU kernels and the runner do what they must on this machine's card, and how soon.

Stages run one after the other in a child process, which is started again where a stage ends it: a fault of a kernel
costs its stage, not the check. Needs no network and no weights: models are random, made on the device.
"""
