"""Numerics of policies by which branches that train apart exchange what they learned.

- Branch: a virtual worker of a job. The number of branches is fixed, and a branch is independent of machines.
- Round: some training steps of a branch, and the merge after them. Rounds count from 1.
- Version: weights after a number of merges; version 0 is the initial weights. Round r starts from version r - 1.
- Contribution: the result of one branch in one round, usually the change of its weights.
- Merge record: entry of the durable log that lists the merged contributions, with their order and factors.

A merge is a pure function of its record and its contributions, so the same log gives the same bits.
"""
