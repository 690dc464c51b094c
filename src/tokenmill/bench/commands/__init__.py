"""One module per `bench` command: its flags, its measurement and what it prints."""
