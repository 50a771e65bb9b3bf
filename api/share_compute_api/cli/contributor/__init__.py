"""Commands of people who lend machines."""
