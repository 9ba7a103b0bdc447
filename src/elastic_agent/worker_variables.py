"""The names of the environment variables that the agent sets for its workers, in addition to torchrun's.

Not in ``client``, whose import connects a worker to its agent: the command line and the spawner need the names too.
"""

PREFIX = "ELASTIC_AGENT_"
"""Begins these names, and those of the variables of settings."""

RUN_ID = PREFIX + "RUN_ID"
NODE_ID = PREFIX + "NODE_ID"
WORKER_ID = PREFIX + "WORKER_ID"
SLOT = PREFIX + "SLOT"
INCARNATION = PREFIX + "INCARNATION"
GENERATION = PREFIX + "GENERATION"
RESTARTS = PREFIX + "RESTARTS"
FIRST_GENERATION = PREFIX + "FIRST_GENERATION"
HEARTBEAT = PREFIX + "HEARTBEAT"
STACKS_SIGNAL = PREFIX + "STACKS_SIGNAL"
PROGRESS = PREFIX + "PROGRESS"
STORE_PORT = PREFIX + "STORE_PORT"
"""The port of the store that the agents host. A script may give MASTER_PORT another value for a store of its own."""
STATE_MEMORY = PREFIX + "STATE_MEMORY"
"""The two files in memory that hold the worker's state for `elastic_agent.survive`, as paths with a colon between."""
TRAINER_MEMORY = PREFIX + "TRAINER_MEMORY"
"""Set with --survive memory and keep: the trainers of frameworks make copies in that memory, too."""
PARKING = PREFIX + "PARKING"
"""With --survive keep, what a worker of `elastic_agent.survive` does: one of the following two."""
KEEP = "keep"
"""It may leave its world, and go on in the next one."""
APART = "apart"
"""It was started apart from any world, and waits for its first one."""

_IDENTITY = (RUN_ID, NODE_ID, WORKER_ID, SLOT, INCARNATION)
WORKER_VARIABLES = frozenset(
    (
        *_IDENTITY,
        GENERATION,
        RESTARTS,
        FIRST_GENERATION,
        HEARTBEAT,
        STACKS_SIGNAL,
        PROGRESS,
        STORE_PORT,
        STATE_MEMORY,
        TRAINER_MEMORY,
        PARKING,
    )
)
"""All of them. None is a setting: an agent started inside a worker must not take the place of the worker's agent."""

LIGHTNING_DISABLE = PREFIX + "LIGHTNING_DISABLE"
"""Set by users: features of the Lightning integration that workers do without."""

TRANSFORMERS_DISABLE = PREFIX + "TRANSFORMERS_DISABLE"
"""Likewise, of the transformers integration."""

LIGHTLY_TRAIN_DISABLE = PREFIX + "LIGHTLY_TRAIN_DISABLE"
"""Likewise, of the LightlyTrain integration."""

SURVIVE_GPU = PREFIX + "SURVIVE_GPU"
"""Set by users: with --survive keep, workers that may use a GPU keep their processes, too."""

LAUNCH_FOLDER = PREFIX + "LAUNCH_FOLDER"
"""Set by `elastic_agent.launch`: where workers find the function, and leave what it returns; the agent, its outcome."""

READ_BY_WORKERS = frozenset(
    (LIGHTNING_DISABLE, TRANSFORMERS_DISABLE, LIGHTLY_TRAIN_DISABLE, SURVIVE_GPU, LAUNCH_FOLDER)
)
"""Variables that are meant for workers. The agent passes them on; they are not settings of its own."""
