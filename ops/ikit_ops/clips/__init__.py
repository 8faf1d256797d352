"""Clips: whether a fast video engine still computes the steps that its model asks for.

``stepdump`` is the contract ``clip-steps.v1`` (what an engine writes), ``modelfree`` the checks
that need the dump alone, ``judge`` the verdicts.  What needs torch -- the recording hook, the
clip server, the seeded noise and the replay -- is in ``engine`` and runs in a process of its own.
"""
