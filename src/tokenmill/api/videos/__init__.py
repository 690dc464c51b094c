"""OpenAI's Videos API: jobs that outlive the server, and the files that they make."""
