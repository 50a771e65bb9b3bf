"""The Ray cluster as the control plane sees it: a Ray head and a gateway, each a child process that may die.

The control plane makes no Ray call itself. The gateway makes them, confined like the head and without any credential of
the control plane, and answers with JSON.
"""
