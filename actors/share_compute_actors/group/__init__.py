"""Code that training and inference share: the group of members that one actor leads, and base classes of members."""
