"""Teachers on a virtual clock: traces, the rules of devices and links, policies, and what a schedule is worth.

`reading` gives a case, `simulator` drives a policy through it, `checker` judges the schedule without trusting the
simulator, `metrics` measures it, `bounds` says what no schedule can beat. `decisions` is the border to a policy, which
runs on the wall clock too.
"""
