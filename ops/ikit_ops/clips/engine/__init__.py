"""What needs torch and diffusers: it runs in a process of its own, in a Python that has them.

``hook`` records the steps of a diffusers pipeline, ``server`` serves clips with it, ``replay``
runs the reference on recorded steps, ``worker`` is the script that ``clip_steps`` starts.
"""
