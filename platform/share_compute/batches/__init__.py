"""The parts of a batch job that need no model: read input rows, store answers in parts, write the output file."""
