"""The engine: everything that needs torch. It knows nothing about HTTP, queues or text."""
