"""Jobs: their states and what an attempt reports."""
