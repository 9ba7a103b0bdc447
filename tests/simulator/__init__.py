"""The protocol under simulated faults: virtual time, one seed, every safety rule checked after every step.

What is real: ``Coordinator``, ``Node``, the drivers (``Session``, ``RunDriver``, ``Election``) and the records of a run
(``NodeRecords``, ``CoordinatorRecords``), over a table in virtual time. What the drivers are given (:mod:`.waits`,
:mod:`.coordination`, :mod:`.election`) are models of their environment: processes that freeze and die, between any two
requests too (:mod:`.kernel`), a network that delays, cuts and loses (:mod:`.network`), keys and values (:mod:`.store`)
and disks (:mod:`.machine`). Simulated, thinly and in the way the real ones work, are the agent's main loop
(:mod:`.agent`), the guard and the workers (:mod:`.guard`) and the faults (:mod:`.scenario`, :mod:`.faults`).

Every third seed has an etcd instead (:mod:`.etcd`): the store is no process of a node, every agent takes part in the
election of the coordinator (:mod:`.election`), and what the real table compares in transactions is compared here.
Should etcd lose its data, the agent that is elected first is taken to know the run's newest generation from its disk,
but for the fault "stranger first": then generations may begin anew, and what is checked from there on is that no two
worlds run at once and that all ends well. The same holds for a c10d store whose machine had a full disk, or lost it
(there, two worlds may run at once for a lease and the margin).

Workers heed stop notices in most seeds, and then save and leave together (:mod:`.job`); who asks for a notice, and
what happens when no agent answers, is in :mod:`.agent`, the rules of it in :mod:`.notice_rules`. Nodes that were
started after a run was stopped go on with it in the store that is there. After a run has ended, all agents are started
again in some seeds, in a new store or in the one from which its records were removed; one machine may have slept
meanwhile.

:mod:`.checker` knows the truth about every worker and holds it against the rules of the design.

Directed scenarios (:mod:`.directed`, :mod:`.scenarios`) draw nothing: each has its faults at given times, and names
the rule that it is about. Random seeds show that no rule breaks in any universe.

``python -m tests.simulator --seeds 2000`` runs many seeds; ``--seed 17 --story`` tells what happened in one;
``--scenario NAME`` runs a directed scenario.
"""
