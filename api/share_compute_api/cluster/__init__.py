"""Runs the Ray head and the gateway as child processes of the control plane, and restarts them after failures.

The control plane makes no Ray calls. The gateway makes these calls, and returns the results as JSON. The gateway is
confined like the head, and has no credentials of the control plane.
"""
