"""``elastic-agent doctor``: examines the machines of a run before it starts, each alone and all together.

Receives everything as values (:class:`.request.Request`). :mod:`.examination` is the whole course of an examination;
the other modules are its checks. Each check returns findings; none of them changes the machine, except for small
files in the folders of ``--paths``, which are removed.
"""
