"""The step protocol: state machines of the coordinator and the members of a training job.

- Member: a process of the job on one machine.
- Stage: a range of layers, and the members that hold them. Their parameters and layers are a shard.
- Cell: the forward or the backward of one microbatch in one stage.
- Open step: the first step that is not committed.
- Generation: a number that grows each time that the open step is restarted because its numbers are in doubt.
- Epoch: a period in which the members and their shards stay the same. It is not a pass over the data.
- Backup, catch-up replica: a member that holds a copy of another member's state.
"""
