"""``python -m elastic_agent``: the same as the ``elastic-agent`` command."""

from elastic_agent.cli.main import console_main

if __name__ == "__main__":
    console_main()
