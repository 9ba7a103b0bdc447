"""``elastic-agent doctor``: examines the machines of a run before it starts, each alone and all together.

:mod:`.local` examines this machine. Then the command starts an agent for an ordinary run, whose worker is
:mod:`.probe`: it exchanges what the machines found, and tests connections, shared folders and an all-reduce.
:mod:`.together` makes one report of it, the same on all machines. No check changes the machine, except for small files
in the folders of ``--paths``, which are removed.
"""
