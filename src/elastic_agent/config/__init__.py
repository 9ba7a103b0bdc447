"""Every setting of the agent: what it means, where it may come from, and what is in force.

``load.load_settings`` is the way in; ``settings.Settings`` is what comes out. Nothing here imports more than the
standard library.
"""
