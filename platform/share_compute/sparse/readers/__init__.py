"""Readers of sparse data: libsvm, ratings, and bags of words. They read files in blocks of bounded size."""
