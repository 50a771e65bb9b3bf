"""Codecs that make tensors smaller before islands exchange them over slow links."""
