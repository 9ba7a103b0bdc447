"""Every setting of the agent: what it means, where it may come from, and what is in force.

:func:`.load.load_settings` is the way in; :class:`.settings.Settings` is what comes out. Nothing here imports more
than the standard library.
"""
