"""The step protocol: state machines of the coordinator and of a member, without Ray, clock or sockets."""
