"""Load from outside: arrivals, connections, records, figures and the audit of the client."""
