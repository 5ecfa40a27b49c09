"""The `jaxoffload` command: a table of subcommands, one file each."""
