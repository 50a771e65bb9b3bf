"""A demonstration on one machine: a server, machines that join it, and a model that is trained on them."""
