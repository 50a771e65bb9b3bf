"""The contributor's side: joins a server, supervises the machine's Ray node, and reports to the server."""
