"""The whole product once, on one machine: a server, machines that join, and a model trained over them."""
