"""Files of batch jobs: read the input rows, store answers in part files, and write the output file."""
