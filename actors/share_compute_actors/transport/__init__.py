"""Transport between members: tensors, pieces of files, and collective sums."""
