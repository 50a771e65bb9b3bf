"""Sparse models on a parameter server: models, update rules, messages, and state machines of servers and workers.

- Key: number of a feature, user, item or word in a file. Place: a 64-bit number that a key is mapped to, one to one.
- Range: an interval of places, whose rows one server holds.
- Worker: a part of the rows of the data. It is independent of machines.
- Clock: number of pushes of a worker. Each push of a worker goes to all ranges, and holds the touched rows of each
  range.
"""
