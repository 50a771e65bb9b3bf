"""Runs work in separate processes: planning, exports, tokenizers and checks of submitters' files."""
