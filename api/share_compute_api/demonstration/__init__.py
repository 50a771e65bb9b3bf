"""The whole path once, on one machine: a server, machines that join, a model trained over them."""
