"""HTTP: the routes of the server, and all that an answer passes."""
