"""External attention: its interface and the backends that compute it."""
