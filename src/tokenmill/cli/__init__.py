"""The command line: one module per subcommand, each importing what it uses when it runs."""
