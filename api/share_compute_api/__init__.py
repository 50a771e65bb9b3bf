"""The control plane, the command line and the Python client."""
