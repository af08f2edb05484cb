"""The subcommands of `turbogr`: each module has `add_parser(subparsers)` and `run(args) -> exit status`."""
