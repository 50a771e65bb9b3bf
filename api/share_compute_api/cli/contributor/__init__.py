"""Commands for people who lend machines."""
