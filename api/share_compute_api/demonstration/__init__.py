"""A demonstration on one computer: a server, machines that join it, and a model that they train."""
