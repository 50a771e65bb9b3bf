"""The coordinator: the actor on the head that leads one attempt at a training job."""
