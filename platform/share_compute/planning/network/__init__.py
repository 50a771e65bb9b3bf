"""Links between machines: estimates of unmeasured links, and groups of machines with similar links."""
