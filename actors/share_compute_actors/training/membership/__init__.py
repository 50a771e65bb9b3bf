"""Changes of a job's members while it trains: machines that join and leave, layers that move, and links that fail."""
