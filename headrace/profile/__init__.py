"""``headrace profile``: where the time of one step of a real model goes, beside what this machine could do.

``steps`` drives a runner as the worker does, ``phases`` tells what a forward pass spends its time on, ``roofline``
measures the machine, ``report`` puts them side by side.
"""
